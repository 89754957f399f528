"""Tiles of grouped GEMMs that a tuning run tries, by kernel and by rows of an expert."""

from __future__ import annotations

from spmd_rl.kernels.moe.grouped_tiles import GradTile, GroupedTile

# Few rows: weights are the first operand, and their tiles keep many bytes on the way.
FEW_GATED = [
    GroupedTile(16, n, k, 4, stages, swap=True)
    for n, k, stages in (
        (16, 256, 3), (16, 128, 5), (32, 128, 3), (32, 128, 4), (32, 128, 5), (32, 256, 3),
        (64, 64, 4), (64, 64, 6), (64, 128, 3), (64, 128, 4), (128, 64, 3),
    )
]  # fmt: skip
FEW_DOWN = [
    GroupedTile(16, n, k, 4, stages, swap=True)
    for n, k, stages in (
        (32, 128, 4), (32, 128, 6), (32, 256, 3), (64, 128, 3), (64, 128, 4), (64, 128, 5),
        (64, 256, 3), (64, 64, 6), (128, 64, 4), (128, 128, 3),
    )
]  # fmt: skip
MANY_GATED = [
    GroupedTile(m, n, k, warps, stages, swap, group)
    for m, n, k, warps, stages, swap, group in (
        (32, 64, 128, 4, 3, True, 8), (32, 64, 64, 4, 5, True, 8), (32, 128, 64, 4, 4, True, 8),
        (64, 64, 64, 4, 4, False, 8), (64, 64, 64, 4, 4, True, 8), (64, 128, 64, 4, 3, False, 8),
        (128, 128, 64, 8, 3, False, 8), (128, 128, 64, 8, 4, False, 8),
        (128, 128, 64, 8, 3, False, 16), (128, 64, 64, 4, 4, False, 8),
    )
]  # fmt: skip
MANY_PLAIN = [
    GroupedTile(m, n, k, warps, stages, False, group)
    for m, n, k, warps, stages, group in (
        (64, 128, 64, 4, 4, 8), (64, 256, 64, 8, 4, 8), (128, 128, 64, 4, 4, 8),
        (128, 128, 64, 8, 4, 8), (128, 256, 64, 8, 3, 8), (128, 256, 64, 8, 4, 8),
        (128, 256, 64, 8, 3, 16), (256, 128, 64, 8, 3, 8),
    )
]  # fmt: skip
GRAD = [
    GradTile(m, n, k, warps, stages)
    for m, n, k, warps, stages in (
        (128, 128, 64, 8, 3), (128, 128, 64, 8, 5), (128, 128, 64, 4, 5), (128, 256, 64, 8, 5),
        (256, 128, 64, 8, 5), (128, 128, 32, 8, 7), (128, 256, 32, 8, 7),
    )
]  # fmt: skip
