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


@dataclass(frozen=True)
class RowLayout:
    """Where the flat tokens of a call go in [B, L] query positions, and back.

    `gather` [B * L] is the token at each query position (0 where padded), `scatter` [T'] the query
    position of each token, T' = T padded to the row tile; `visible` [B, L * G] how many keys a row
    sees (from the first), at least 1. Rows from `num_used` on are padding in every sequence, and
    keys from `num_keys` on are seen by no row. `is_causal`: no sequence has keys before its tokens,
    so that the nth of them, with a row for each of `groups` heads, sees n keys.
    """

    batch: int
    groups: int
    num_used: int
    num_keys: int
    is_causal: bool
    gather: Tensor
    scatter: Tensor
    visible: Tensor

    @staticmethod
    def build(
        first: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        queries_per_key: int,
        device: torch.device,
    ) -> RowLayout:
        """`first` [B]: where each sequence's new tokens begin; `starts` [B]: keys that exist before
        them; `lengths` [B]: new tokens."""
        unit = QUERY_TILE // math.gcd(QUERY_TILE, queries_per_key)
        batch, positions = len(lengths), -(-int(lengths.max()) // unit) * unit
        offset = np.arange(positions)
        valid = offset < lengths[:, None]
        gather = np.where(valid, first[:, None] + offset, 0)
        visible = np.where(valid, starts[:, None] + offset + 1, 1)
        scatter = _padded(np.flatnonzero(valid))

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        num_used, num_keys = int(lengths.max()) * queries_per_key, padded_rows(int(visible.max()))
        seen = tensor(visible.repeat(queries_per_key, axis=1))
        sizes = batch, queries_per_key, num_used, num_keys, not starts.any()
        return RowLayout(*sizes, tensor(gather.reshape(-1)), tensor(scatter), seen)

    def unseen(self, rows: slice) -> Tensor:
        """[B, r, W]: minus infinity where one of these rows does not see a key, else 0; all rows'
        serve every layer.
        """
        return self._unseen if rows == slice(0, self.num_used) else self._hidden_from(rows)

    @cached_property
    def _unseen(self) -> Tensor:
        return self._hidden_from(slice(0, self.num_used))

    def _hidden_from(self, rows: slice) -> Tensor:
        hidden = torch.arange(self.num_keys, device=self.visible.device) >= self.visible[
            :, rows
        ].unsqueeze(-1)
        return torch.where(hidden, -torch.inf, 0.0)

    def rows(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """q [T, H, D] -> [K, B, L * G, D]."""
        laid = lay_rows(q.reshape(len(q), num_kv_heads, -1), self.gather)
        return laid.view(num_kv_heads, self.batch, -1, q.shape[-1])

    def tokens(self, out: Tensor) -> Tensor:
        """[K, B, L * G, D] -> [T', H, D]."""
        num_kv_heads, size = len(out), len(self.gather)
        heads = _of_each_head(self.scatter, num_kv_heads, size).t().reshape(-1)
        return (
            out.reshape(num_kv_heads * size, -1)
            .index_select(0, heads)
            .view(len(self.scatter), -1, out.shape[-1])
        )


def doublings(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often a tile of rows is doubled to hold so many: what is laid out together has one
    number.
    """
    numbers: NDArray[np.int64] = np.ceil(np.log2(np.maximum(counts / QUERY_TILE, 1))).astype(
        np.int64
    )
    return numbers


def lay_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, K, D] -> [K, R, D], the rows of each head; what is copied, and added in the gradient,
    is contiguous.
    """
    num_tokens, num_heads, dim = x.shape
    heads = x.transpose(0, 1).reshape(num_heads * num_tokens, dim)
    laid = heads.index_select(0, _of_each_head(rows, num_heads, num_tokens).view(-1))
    return laid.view(num_heads, len(rows), dim)


def _of_each_head(rows: Tensor, num_heads: int, num_rows: int) -> Tensor:
    """[R] -> [K, R]: where `rows` lie in [K * num_rows]."""
    return rows + torch.arange(0, num_heads * num_rows, num_rows, device=rows.device).unsqueeze(1)


def token_order(
    lengths: NDArray[np.int64], parts: NDArray[np.int64], device: torch.device
) -> Tensor:
    """[T']: where each token's output lies, the parts' outputs one after the other, each padded to
    the row tile.
    """
    part = np.repeat(parts, lengths)
    place, size = np.empty(len(part), dtype=np.int64), 0
    for number in np.unique(parts):
        own = part == number
        count = int(own.sum())
        place[own] = size + np.arange(count)
        size += padded_rows(count)
    return torch.from_numpy(_padded(place)).to(device)


def _padded(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Zeros appended up to the row tile."""
    return np.pad(indices, (0, padded_rows(len(indices)) - len(indices)))
