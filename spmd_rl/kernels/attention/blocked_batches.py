"""Packed sequences and pages of a cache, laid out in rows for blocked attention.

Sequences of about the same size are computed as one batch, so that few long ones do not widen all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.blocked import attention_of_rows
from spmd_rl.kernels.attention.row_layout import (
    QUERY_TILE,
    RowLayout,
    doublings,
    lay_rows,
    token_order,
)
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach
from spmd_rl.kernels.runtime.padding import padded_rows, unpad_rows


class _Batch(Protocol):
    """Sequences that are computed together."""

    layout: RowLayout

    def laid_out(self, x: Tensor) -> Tensor:
        """Lay out keys or values as [K, B, S, D]."""


class _Batches:
    """Kernel of blocked attention: one call for each batch, then tokens in their own order."""

    def __init__(self, batches: Sequence[_Batch], order: Tensor | None) -> None:
        self.batches = batches
        self.order = order

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach = WHOLE) -> Tensor:
        outs = [_attend(batch, q, k, v, reach) for batch in self.batches]
        out = outs[0] if self.order is None else torch.cat(outs).index_select(0, self.order)
        return unpad_rows(out, len(q))


def _attend(batch: _Batch, q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> Tensor:
    layout = batch.layout
    rows = layout.rows(q, q.shape[1] // layout.groups)
    laid = batch.laid_out(k), batch.laid_out(v)
    return layout.tokens(attention_of_rows(rows, *laid, layout, reach))


class PackedBlocks(_Batches):
    """Attention within packed sequences; shapes as in `PackedAttention`."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        prefixes: NDArray[np.int32],
        heads_per_kv: int,
        device: torch.device,
    ) -> None:
        numbers = doublings(lengths * heads_per_kv)
        batches = [
            _PackedBatch(lengths, prefixes, np.flatnonzero(numbers == number), heads_per_kv, device)
            for number in np.unique(numbers)
        ]
        order = token_order(lengths, numbers, device) if len(batches) > 1 else None
        super().__init__(batches, order)


class _PackedBatch:
    """The packed sequences whose indices are `chosen`."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        prefixes: NDArray[np.int32],
        chosen: NDArray[np.int64],
        heads_per_kv: int,
        device: torch.device,
    ) -> None:
        first_tokens = np.cumsum(lengths) - lengths
        prefix_lengths = np.where(prefixes >= 0, lengths[prefixes], 0)
        first, starts = first_tokens[chosen], prefix_lengths[chosen]
        ends = starts + lengths[chosen]
        self.layout = RowLayout.build(first, starts, lengths[chosen], heads_per_kv, device)
        self.num_keys = padded_rows(int(ends.max()))
        key = np.arange(self.num_keys)
        in_prefix = first_tokens[prefixes[chosen]][:, None] + key
        in_sequence = first[:, None] + key - starts[:, None]
        tokens = np.where(key < starts[:, None], in_prefix, in_sequence)
        tokens = np.where(key < ends[:, None], tokens, 0)
        self.key_tokens = torch.from_numpy(tokens.reshape(-1)).to(device)

    def laid_out(self, x: Tensor) -> Tensor:
        """Lay out keys or values [T', K, D]."""
        rows = lay_rows(x, self.key_tokens)
        return rows.view(x.shape[1], self.layout.batch, self.num_keys, -1)


class PagedBlocks(_Batches):
    """Attention of new tokens to pages of a cache; shapes as in `PagedAttention.chunks`."""

    def __init__(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        heads_per_kv: int,
        device: torch.device,
    ) -> None:
        first = np.cumsum(lengths) - lengths
        numbers = batch_numbers(lengths * heads_per_kv, starts + lengths, device)
        batches = []
        for number in np.unique(numbers):
            chosen = numbers == number
            layout = RowLayout.build(
                first[chosen], starts[chosen], lengths[chosen], heads_per_kv, device
            )
            ends = starts[chosen] + lengths[chosen]
            batches.append(_PagedBatch(layout, page_table[chosen], ends, page_size, device))
        order = token_order(lengths, numbers, device) if len(batches) > 1 else None
        super().__init__(batches, order)


def batch_numbers(
    rows: NDArray[np.int64], keys: NDArray[np.int64], device: torch.device
) -> NDArray[np.int64]:
    """Number the batch of each sequence, given its query rows and its keys; all shape [B].

    On a CPU a call costs more than padding: sequences of one tile of rows are one batch, all others
    another. With batches by doublings, a rollout of the example takes 1.12 times as long.
    """
    if device.type == "cpu":
        return (rows > QUERY_TILE).astype(np.int64)
    sizes = np.stack((doublings(rows), doublings(keys)))
    return np.unique(sizes, axis=1, return_inverse=True)[1].reshape(-1)


class _PagedBatch:
    """Sequences with their pages; a sequence's first page stands in past its end."""

    def __init__(
        self,
        layout: RowLayout,
        page_table: NDArray[np.int64],
        ends: NDArray[np.int64],
        page_size: int,
        device: torch.device,
    ) -> None:
        num_pages = -(-padded_rows(int(ends.max())) // page_size)
        used = -(-ends // page_size)
        table = np.repeat(page_table[:, :1], num_pages, axis=1)
        width = min(num_pages, page_table.shape[1])
        table[:, :width] = np.where(
            np.arange(width) < used[:, None], page_table[:, :width], page_table[:, :1]
        )
        self.layout = layout
        self.page_size = page_size
        self.pages = torch.from_numpy(table.reshape(-1)).to(device)

    def laid_out(self, x: Tensor) -> Tensor:
        """Lay out cached keys or values [K, slots, D]."""
        num_kv_heads, _, dim = x.shape
        by_page = x.view(num_kv_heads, -1, self.page_size, dim)
        pages = by_page.index_select(1, self.pages)
        return pages.view(num_kv_heads, self.layout.batch, -1, dim)
