"""Hopper code of the kernel that adds adapters: one chain, and no rounding left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from spmd_rl.kernels.linear import adapters_triton
from spmd_rl.kernels.linear.adapters_triton import TILES, add_low_rank
from tests.unit.kernels.compiled import SHARED_BYTES, compiled_of, instructions

ROWS = {least: max(least, 1) for least in TILES}


@pytest.fixture(autouse=True, scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither use nor leave behind compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("rank", [3, 8, 16, 64, 128])
@pytest.mark.parametrize("rows", ROWS.values())
def test_tensor_cores_sum_one_chain_and_each_rounding_stays(rows: int, rank: int) -> None:
    product, low, up = (
        torch.zeros(shape, dtype=torch.bfloat16)
        for shape in ((rows, 6144), (rows, 3 * rank), (6144, rank))
    )
    compiled = compiled_of(
        adapters_triton._add_low_rank,
        lambda: add_low_rank(product, low, up, 1.7, (4096, 1024, 1024)),
    )
    assert compiled.metadata.shared <= SHARED_BYTES
    found = instructions(compiled.asm["ptx"])
    kinds = {name.partition(".")[0] for name in found if name.startswith(("mma", "wgmma.mma"))}
    assert len(kinds) == 1
    assert not any(name.startswith(("fma.", "red.", "atom.")) for name in found)
    tile = next(tile for least, tile in reversed(TILES.items()) if rows >= least)
    each = tile.m * tile.n // (32 * tile.warps)
    # A sum of two bf16 is the same in bf16 as in float32 and rounded: the compiler may take it.
    sums = found["add.f32"] + found["add.rn.f32"] + 2 * found["add.rn.bf16x2"]
    assert sums == each, "the sum with the product alone"
