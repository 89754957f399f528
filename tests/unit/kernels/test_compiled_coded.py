"""Products of weights in 8 bits, compiled for Hopper: one chain of wgmma over ascending K."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
import torch

pytest.importorskip("triton")


from spmd_rl.kernels.low_precision import block_codes, coded_gemm_triton, rounding_triton
from spmd_rl.kernels.low_precision.coded_dispatch import TILES, WIDE, choose_coded_tile
from spmd_rl.kernels.low_precision.coded_gemm_triton import CodedTile
from spmd_rl.model.formats import FORMATS
from tests.unit.kernels.compiled import instructions, ptx_of, spilled_bytes

WGMMA_ROWS, WGMMA_K = 64, 16
ALL_TILES = sorted({tile for pair in TILES.values() for tile in pair})


# of a format, and of tiles that serve it
PRODUCTS = [
    (name, tile)
    for name, one in FORMATS.items()
    for tile in ALL_TILES
    if one.per_byte == 1 or tile.k == one.block_columns
]


@lru_cache
def product_ptx(name: str, tile: CodedTile) -> str:
    n, k = 256, 1024
    x = torch.zeros(8, k, dtype=torch.bfloat16)
    weight, out = (
        block_codes.quantised(FORMATS[name], torch.randn(n, k)),
        torch.zeros(8, n, dtype=torch.bfloat16),
    )
    return ptx_of(
        coded_gemm_triton._coded_matmul,
        lambda: coded_gemm_triton.coded_matmul_into(out, x, weight, None, tile),
    )


@pytest.mark.parametrize(("name", "tile"), PRODUCTS, ids=str)
def test_a_step_is_one_chain_of_wgmma(name: str, tile: CodedTile) -> None:
    """mma.sync would take its steps of K from codes in another order."""
    found = instructions(ptx := product_ptx(name, tile))
    chains = re.findall(r"wgmma\.mma_async\S*k16\.f32\.bf16\.bf16", ptx)
    height = tile.n if tile.warps == 4 else tile.n // 2  # of a group of four warps
    each = max(height // WGMMA_ROWS, 1)
    assert len(chains) == tile.k // WGMMA_K * each
    assert not any(name.startswith("mma.sync") for name in found)
    assert not any(name.startswith(("add.f32", "add.rn.f32", "fma.rn.f32")) for name in found)
    assert spilled_bytes(ptx) == 0


@pytest.mark.parametrize(("name", "tile"), PRODUCTS, ids=str)
def test_a_step_has_one_multiplication_for_two_codes(name: str, tile: CodedTile) -> None:
    block = FORMATS[name].block_columns
    assert block % tile.n == block % tile.k == 0
    found = instructions(product_ptx(name, tile))
    of_thread = tile.n * tile.k // (32 * tile.warps)
    assert found["mul.rn.bf16x2"] == of_thread // 2


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_rounded_to_nearest(name: str) -> None:
    own, values = FORMATS[name], torch.randn(64, 128)
    scales = block_codes.quantised(own, values).scales
    found = instructions(
        ptx_of(
            rounding_triton._round,
            lambda: rounding_triton.encode_on_gpu(own, values, scales, 0),
        )
    )
    if name == "e4m3":
        assert found["cvt.rn.satfinite.e4m3x2.f32"] > 0
    assert found["div.rn.f32"] > 0, "the inverse of a scale is that of the CPU"
    assert not any(one.startswith("fma") for one in found), "it would round once less than the CPU"


@pytest.mark.parametrize("name", FORMATS)
def test_several_weights_are_read_in_loads_of_16_bytes(name: str) -> None:
    own, values = FORMATS[name], [torch.zeros(64, 128) for _ in range(3)]
    scales = [own.scales_of(block_codes.maxima(own, one, 64)) for one in values]
    out = torch.zeros(3, 64, 128, dtype=torch.bfloat16)
    found = instructions(
        ptx_of(
            rounding_triton._round,
            lambda: rounding_triton.round_each_on_gpu(own, values, scales, out, 0),
        )
    )
    assert found["ld.global.v4.b32"] and not any(one.startswith("fma") for one in found)


def test_many_rows_and_none_have_no_tile() -> None:
    assert choose_coded_tile(0, WIDE) is None
    assert choose_coded_tile(max(TILES) + 1, WIDE) is None
    for m in range(1, max(TILES) + 1):
        tile = choose_coded_tile(m, 1024)
        assert tile is not None and tile.m == min(rows for rows in TILES if m <= rows)
