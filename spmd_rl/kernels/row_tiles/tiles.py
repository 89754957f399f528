"""Which rows and which keys a program of attention takes, found on the device.

A row is a pair of a token and one of the heads that share its keys. Those of a sequence are
numbered token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from spmd_rl.kernels.runtime.upload import upload

PAGE = 64  # tokens; no block of keys crosses a page


class Sequences(NamedTuple):
    """New tokens of sequences, and where their keys lie.

    The new tokens of sequence b are `bounds[b]` to `bounds[b + 1]` of a pass; with them it has
    `num_keys[b]` tokens. Its page n begins at row `pages[first_page[b] + n] * unit` of the keys.
    Shape: bounds [B + 1]; num_keys and first_page [B]; pages of any size; all int32 or int64.
    """

    bounds: Tensor
    num_keys: Tensor
    pages: Tensor
    first_page: Tensor
    unit: int


class RowTiles(NamedTuple):
    """Tiles of `height` rows, each of one sequence.

    `table` [5, N] int32 says of each: the sequence's first new token and its rows, how many tokens
    it has before these, its first place in `pages`, and the tile's first row. Tiles that no
    sequence needs have no rows. `pages` [..] int32 and `unit` are those of `Sequences`.
    """

    table: Tensor
    height: int
    pages: Tensor
    unit: int

    @property
    def number(self) -> int:
        return self.table.shape[1]


def sequences_of(lengths: NDArray[np.int64], device: torch.device) -> Sequences:
    """Return sequences that lie end to end, as their keys do: each 64 of these are a page."""
    ends, numbers = np.cumsum(lengths), -(-lengths // PAGE)
    first_page = np.cumsum(numbers) - numbers
    nth = np.arange(numbers.sum()) - np.repeat(first_page, numbers)
    pages = np.repeat(ends - lengths, numbers) + nth * PAGE
    arrays = np.array([0, *ends]), lengths, pages, first_page
    bounds, num_keys, at, first = (upload(one, device) for one in arrays)
    return Sequences(bounds, num_keys, at, first, unit=1)


def sequences_in_pages(
    pages: Tensor, num_keys: Tensor, bounds: Tensor, page_size: int
) -> Sequences:
    """Return sequences whose keys lie in pages. Shape: pages [B, P], others as in `Sequences`."""
    batch, width = pages.shape
    first_page = torch.arange(batch, device=pages.device) * width
    return Sequences(bounds, num_keys, pages.flatten(), first_page, page_size)


class PackedTiles:
    """Tiles of sequences that lie end to end, for any number of rows with padding."""

    def __init__(self, lengths: NDArray[np.int64], device: torch.device) -> None:
        self._lengths, self._device = lengths, device
        self._kept: dict[tuple[int, int], tuple[RowTiles, RowTiles]] = {}

    def of(self, num_rows: int, heads: int, height: int) -> tuple[RowTiles, RowTiles]:
        """Return the tiles of rows, and of keys. Padding is one more sequence."""
        if (num_rows, heads) not in self._kept:
            padding = num_rows - int(self._lengths.sum())
            lengths = np.append(self._lengths, padding) if padding else self._lengths
            given = sequences_of(lengths, self._device)
            of_keys = tiles_of(given, 1, PAGE, len(given.pages))
            self._kept[num_rows, heads] = row_tiles(given, heads, height, num_rows), of_keys
        return self._kept[num_rows, heads]


def row_tiles(given: Sequences, heads: int, height: int, num_tokens: int) -> RowTiles:
    """Cut the rows of at most `num_tokens` tokens."""
    return tiles_of(given, heads, height, num_tokens * heads // height + len(given.num_keys))


def tiles_of(given: Sequences, heads: int, height: int, most: int) -> RowTiles:
    """Cut the rows of all sequences into tiles, at most `most`; the host reads nothing."""
    lengths = given.bounds.diff()
    counts = lengths * heads
    numbers = (counts + (height - 1)) // height
    owner, nth = _owners(numbers, most)
    known = [given.bounds[:-1], counts, given.num_keys - lengths, given.first_page]
    facts = pad(torch.stack(known).int(), (0, 1))  # nobody has no rows
    table = torch.cat([facts[:, owner], (nth * height).int()[None]])
    return RowTiles(table, height, given.pages.int(), given.unit)


def _owners(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Number `most` things, of which sequence b owns `numbers[b]`: return owners, and the nth of
    each that a thing is. Those of nobody are the first ones of owner B.
    """
    ends = numbers.cumsum(0)
    thing = torch.arange(most, device=ends.device)
    owner = torch.searchsorted(ends, thing, right=True)
    begins = torch.cat([ends - numbers, ends[-1:]])
    return owner, thing - begins[owner]
