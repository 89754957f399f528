"""Tiles of products with codes: what coded_gemm.cu asks of them, and which rows they serve."""

from __future__ import annotations

import itertools

import pytest

from spmd_rl.kernels.low_precision.coded_gemm import (
    MOST_ROWS,
    SHARED_BYTES,
    WARP_TILES,
    WarpTile,
    choose_warp_tile,
    group_product,
    kernel_name,
)
from spmd_rl.model.formats import FORMATS

UNIT = 16  # bytes of a copy
MOST_THREAD_REGISTERS, REGISTERS = 255, 1 << 16
BITS = sorted(one.bits for one in FORMATS.values())
BLOCK = 128  # columns
TILES = sorted({tile for row in WARP_TILES.values() for _, tile in row})
BOTH = list(itertools.product(BITS, TILES))


@pytest.mark.parametrize(("bits", "tile"), BOTH, ids=str)
def test_threads_take_the_same_units_of_each_row(bits: int, tile: WarpTile) -> None:
    for bytes_of_row in tile.step * bits // 8, 2 * tile.step:
        assert bytes_of_row % UNIT == 0 and tile.threads % (bytes_of_row // UNIT) == 0
    assert tile.step % BLOCK == 0


@pytest.mark.parametrize(("bits", "tile"), BOTH, ids=str)
def test_stages_fit_and_keep_memory_busy(bits: int, tile: WarpTile) -> None:
    assert tile.stages(bits) >= 3
    assert tile.blocks * tile.stages(bits) * tile.stage_bytes(bits) <= SHARED_BYTES


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_warps_share_the_rows(tile: WarpTile) -> None:
    if tile.grouped:
        assert tile.warps % 4 == 0 and tile.rows == 16 * tile.warps and tile.step % 128 == 0
    else:
        assert tile.rows % (8 * tile.warps) == 0 and tile.cols in (8, 16)
    sums = tile.cols // 2 if tile.grouped else tile.rows // tile.warps // 2
    assert sums < MOST_THREAD_REGISTERS
    assert tile.blocks * tile.threads * sums < REGISTERS


def test_all_numbers_of_rows_have_a_tile() -> None:
    for m, n in itertools.product(range(1, MOST_ROWS + 1), (64, 4096, 6144, 24576, 1 << 20)):
        tile = choose_warp_tile(m, n)
        assert tile.cols <= 16 or m > 16, "wgmma would multiply rows that are not there"
        # x is read again for each tile of its rows
        assert m <= tile.cols * (2 if tile.cols < 128 else 4)
    with pytest.raises(StopIteration):
        choose_warp_tile(MOST_ROWS + 1, 64)


def test_a_group_names_each_sum_once() -> None:
    for cols in sorted({tile.cols for tile in TILES if tile.grouped}):
        source = group_product(cols)
        assert f"m64n{cols}k16" in source
        assert [source.count(f"sums[{one}]") for one in range(cols // 2)] == [1] * (cols // 2)
        assert f"sums[{cols // 2}]" not in source


def test_a_kernel_is_named_by_its_template() -> None:
    tile = WarpTile(64, 32, 4, 256, grouped=True)
    assert kernel_name(8, tile) == f"coded_matmul<8, 64, 32, 4, 256, {tile.stages(8)}, 1, true>"
