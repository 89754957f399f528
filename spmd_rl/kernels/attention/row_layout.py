"""Layout of query rows for blocked attention: sequences side by side, in tiles of one height.

Shape letters as in blocked.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.runtime.padding import padded_rows

QUERY_TILE = 8  # rows
KV_BLOCK = 64  # keys


@dataclass(frozen=True)
class RowLayout:
    """Map between the flat tokens of a call and query positions [B, L].

    `gather` [B * L] is the token at each query position, 0 where padded. `scatter` [T'] is the
    query position of each token, T' = T padded to the row tile. `visible` [B, L * G] is how many
    keys a row sees from the first, at least 1. Rows from `num_used` on are padding in every
    sequence. No row sees keys from `num_keys` on, and none at query position i fewer than
    `least_visible[i]` of a sequence with a token there. `is_causal`: no sequence has keys before
    its tokens, so the nth token of a sequence sees n keys, in a row for each of its `groups` heads.
    """

    batch: int
    groups: int
    num_used: int
    num_keys: int
    is_causal: bool
    gather: Tensor
    scatter: Tensor
    visible: Tensor
    least_visible: NDArray[np.int64]

    @staticmethod
    def build(
        first: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        queries_per_key: int,
        device: torch.device,
    ) -> RowLayout:
        """Build the layout for `lengths` [B] new tokens after `starts` [B] earlier keys.

        `first` [B] is where each sequence's new tokens begin.
        """
        unit = QUERY_TILE // math.gcd(QUERY_TILE, queries_per_key)
        batch, positions = len(lengths), -(-int(lengths.max()) // unit) * unit
        offset = np.arange(positions)
        valid = offset < lengths[:, None]
        gather = np.where(valid, first[:, None] + offset, 0)
        visible = np.where(valid, starts[:, None] + offset + 1, 1)
        scatter = _padded(np.flatnonzero(valid))
        least = np.where(valid, visible, visible.max()).min(0)

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        num_used, num_keys = int(lengths.max()) * queries_per_key, padded_rows(int(visible.max()))
        seen = tensor(visible.repeat(queries_per_key, axis=1))
        sizes = batch, queries_per_key, num_used, num_keys, not starts.any()
        return RowLayout(*sizes, tensor(gather.reshape(-1)), tensor(scatter), seen, least)

    def first_key(self, rows: slice, window: int) -> int:
        """Return a key before which no row of `rows` sees any, the first of a block."""
        if not window:
            return 0
        first = int(self.least_visible[rows.start // self.groups]) - window
        return max(0, first) // KV_BLOCK * KV_BLOCK

    def unseen(self, rows: slice, window: int = 0) -> Tensor:
        """Return minus infinity where a row does not see a key, else 0. Shape: [B, r, W].

        With a `window`, keys begin with `first_key`. The mask of all rows is kept, as every layer
        needs it.
        """
        if rows != slice(0, self.num_used):
            return self._hidden_from(rows, window)
        if window not in self._kept:
            self._kept[window] = self._hidden_from(rows, window)
        return self._kept[window]

    @cached_property
    def _kept(self) -> dict[int, Tensor]:
        """Masks of all rows by their windows."""
        return {}

    def _hidden_from(self, rows: slice, window: int) -> Tensor:
        first = self.first_key(rows, window)
        key = torch.arange(first, self.num_keys, device=self.visible.device)
        # padding sees a key too, so that no weight is NaN
        end = self.visible[:, rows].clamp(min=first + 1).unsqueeze(-1)
        hidden = key >= end
        if window:
            hidden |= key < end - window
        return torch.where(hidden, -torch.inf, 0.0)

    def rows(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """Lay out q [T, H, D] as [K, B, L * G, D]."""
        rows = lay_rows(q.reshape(len(q), num_kv_heads, -1), self.gather)
        return rows.view(num_kv_heads, self.batch, -1, q.shape[-1])

    def tokens(self, out: Tensor) -> Tensor:
        """Put rows [K, B, L * G, D] back into the order of tokens [T', H, D]."""
        num_kv_heads, size = len(out), len(self.gather)
        heads = _of_each_head(self.scatter, num_kv_heads, size).t().reshape(-1)
        return (
            out.reshape(num_kv_heads * size, -1)
            .index_select(0, heads)
            .view(len(self.scatter), -1, out.shape[-1])
        )


def doublings(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often a tile of rows must be doubled to hold each of `counts` rows.

    Sequences with the same number are laid out together.
    """
    numbers: NDArray[np.int64] = np.ceil(np.log2(np.maximum(counts / QUERY_TILE, 1))).astype(
        np.int64
    )
    return numbers


def lay_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather `rows` [R] of x [T, K, D] for each head, as [K, R, D].

    Memory that is copied, and added to in the gradient, is contiguous.
    """
    num_tokens, num_heads, dim = x.shape
    heads = x.transpose(0, 1).reshape(num_heads * num_tokens, dim)
    chosen = heads.index_select(0, _of_each_head(rows, num_heads, num_tokens).view(-1))
    return chosen.view(num_heads, len(rows), dim)


def _of_each_head(rows: Tensor, num_heads: int, num_rows: int) -> Tensor:
    """Return where `rows` [R] of each head lie in [K * num_rows]. Shape: [K, R]."""
    return rows + torch.arange(0, num_heads * num_rows, num_rows, device=rows.device).unsqueeze(1)


def token_order(
    lengths: NDArray[np.int64], parts: NDArray[np.int64], device: torch.device
) -> Tensor:
    """Return where each token's output lies among the batches' outputs. Shape: [T'].

    The outputs lie one after the other, each padded to the row tile. `parts` is each sequence's
    batch.
    """
    part = np.repeat(parts, lengths)
    order, size = np.empty(len(part), dtype=np.int64), 0
    for number in np.unique(parts):
        chosen = part == number
        count = int(chosen.sum())
        order[chosen] = size + np.arange(count)
        size += padded_rows(count)
    return torch.from_numpy(_padded(order)).to(device)


def _padded(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Append zeros up to the row tile."""
    return np.pad(indices, (0, padded_rows(len(indices)) - len(indices)))
