"""Tiles of rows: each row of each sequence is in one, and tiles of nobody have none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spmd_rl.kernels.row_tiles.tiles import PAGE, Sequences, sequences_of, tiles_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 5, 16, 128])
@pytest.mark.parametrize("spare", [0, 7])
def test_every_row_is_in_one_tile(heads: int, spare: int) -> None:
    lengths, before = np.array([1, 0, 70, 3]), np.array([9, 0, 0, 200])
    bounds = torch.from_numpy(np.array([0, *np.cumsum(lengths)]))
    num_keys, first_page = torch.from_numpy(lengths + before).int(), torch.arange(4) * 5
    given = Sequences(bounds, num_keys, torch.arange(20), first_page, PAGE)
    height = 64
    most = int(sum(-(-lengths * heads // height))) + spare
    tiles = tiles_of(given, heads, height, most)
    assert tiles.table.dtype == torch.int32 and tiles.number == most
    found = []
    for first, count, begin, page, row in tiles.table.T.tolist():
        rows = range(row, min(row + height, count))
        found += [(first * heads + one, begin + one // heads, page) for one in rows]
    assert found == [
        (int(bounds[one]) * heads + row, int(before[one]) + row // heads, 5 * one)
        for one, length in enumerate(lengths)
        for row in range(length * heads)
    ]


def test_keys_that_lie_end_to_end_are_in_pages() -> None:
    given = sequences_of(np.array([1, 130, 64]), CPU)
    assert given.pages.tolist() == [0, 1, 65, 129, 131]
    assert given.first_page.tolist() == [0, 1, 4] and given.unit == 1
    blocks = tiles_of(given, 1, PAGE, 5)
    assert blocks.table[[0, 1, 4]].T.tolist() == [
        [0, 1, 0],
        [1, 130, 0],
        [1, 130, 64],
        [1, 130, 128],
        [131, 64, 0],
    ]
