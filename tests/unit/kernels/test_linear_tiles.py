"""The tables of tiles and rings: every ring fits a multiprocessor, and who has a ring has a tile too."""

from __future__ import annotations

import pytest

from spmd_rl.kernels.linear_tiles import (
    BLOCKS,
    GATED_RINGS,
    LARGE_BYTES,
    PART,
    RINGS,
    Ring,
    choose_gated_tile,
    choose_ring,
    even_ring,
)

SHARED_BYTES = 227 << 10
WGMMA_ROWS = 64
ROWS = (1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256)


def shared_bytes(ring: Ring, halves: int) -> int:
    high = 1 << (ring.n - 1).bit_length()
    behind = max(0, WGMMA_ROWS - high) * PART * 2  # what a low tile's operand reads behind the last one
    return ring.stages * (ring.k * (ring.m + halves * high) * 2 + 8) + behind


@pytest.mark.parametrize(("table", "halves"), [(RINGS, 1), (GATED_RINGS, 2)])
def test_every_ring_fits_shared_memory(table: dict[int, tuple[tuple[int, Ring], ...]], halves: int) -> None:
    for rows, row in table.items():
        for _, ring in row:
            assert shared_bytes(ring, halves) <= SHARED_BYTES, ring
            assert ring.k % PART == 0 and ring.stages >= 2 and ring.m <= max(rows, 16)


@pytest.mark.parametrize("gated", [False, True])
def test_even_rings_fill_every_multiprocessor_once_or_twice(gated: bool) -> None:
    found = [(n, even_ring(m, n, gated)) for m in (1, 16, 32) for n in range(1024, 28673, 128)]
    assert sum(ring is not None for _, ring in found) > 100
    for n, ring in found:
        if ring is not None:
            fitting = (SHARED_BYTES + 1024) // (shared_bytes(ring, 2 if gated else 1) + 1024)
            assert n == ring.n * BLOCKS * fitting and ring.stages >= 3, ring


def test_a_gated_ring_is_chosen_only_where_a_gated_tile_is() -> None:
    for m in ROWS:
        for n in (1024, 3072, 4096, 9728, 12288, 40000):
            assert choose_ring(m, n, 4096, gated=True) is None or choose_gated_tile(m, n) is not None


def test_more_rows_than_the_last_bucket_have_no_ring() -> None:
    assert choose_ring(256, 1024, 1024) is not None
    assert choose_ring(257, 1024, 1024) is None
    assert choose_ring(128, 4096, 1024) is None


@pytest.mark.parametrize(
    ("n", "k", "gated", "rows"),
    [
        (4096, 1024, False, 64),
        (4096, 1000, False, None),  # K in no whole parts
        (4096, 4096, False, 32),  # from 24 MiB: a part for each multiprocessor
        (2560, 9728, False, 20),
        (12288, 4096, True, 48),
        (3072, 1024, True, 64),
        (4160, 4096, False, None),  # no 128 equal parts
        (151936, 4096, False, 64),
    ],
)
def test_large_weights_are_shared_evenly(n: int, k: int, gated: bool, rows: int | None) -> None:
    assert getattr(choose_ring(16, n, k, gated), "n", None) == rows
    assert (2 * n * k * (2 if gated else 1) >= LARGE_BYTES) == (rows in (20, 32, 48) or n in (4160, 151936))
