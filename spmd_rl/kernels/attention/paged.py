"""The engine's side of attention: keys and values in pages, read back in the order that the trainer
sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.blocked import (
    QUERY_TILE,
    RowLayout,
    attention_of_rows,
    doublings,
    token_order,
)
from spmd_rl.kernels.attention.flash import (
    DecodeFlash,
    PagedFlash,
    check_split,
    flash_of_chunks,
    flash_takes,
)
from spmd_rl.kernels.attention.flash_splits import DecodeSplits, PagedSplits
from spmd_rl.kernels.attention.kv_write import KvPlace, write_kv
from spmd_rl.kernels.runtime.padding import cut_rows, padded_rows
from spmd_rl.kernels.runtime.upload import upload


class KvCache:
    """Pages of keys and values for every layer; slot = page * page_size + offset.

    It starts at zero and must stay finite, and so must products with its keys: unused slots of a
    page are read, and their values multiplied by exact zeros.
    Shape: each layer's keys and values are [num_pages, page_size, K, D] for FlashAttention, else
    [K, num_pages * page_size, D]. `allocate` makes its memory: so many bytes, uint8 and zero.
    `split`: how many tokens, a multiple of the page, are seen at once (splits.py); 0 for all. One
    stream at a time may read it (`handed_out`).
    Raises: ConfigError where attention in splits cannot run.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Callable[[int], Tensor] | None = None,
        split: int = 0,
    ) -> None:
        check_split(split, head_dim, dtype, device)
        self.split = split
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.flash = flash_takes(head_dim, dtype, device)
        self.handed_out = torch.zeros(1, dtype=torch.int32, device=device)
        pages = (
            (num_pages, page_size, num_kv_heads)
            if self.flash
            else (num_kv_heads, num_pages * page_size)
        )
        shape = (num_layers, 2, *pages, head_dim)
        memory = (allocate or partial(_zeros, device=device))(math.prod(shape) * dtype.itemsize)
        self.data = memory.view(dtype).view(shape)
        self.layers = [(layer[0], layer[1]) for layer in self.data]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Shape: slots [T]; k and v [T', K, D], of which the first T rows are written."""
        keys, values = self.layers[layer]
        if self.flash:
            write_kv(keys, values, slots, k, v)
            return
        for pages, new in ((keys, k), (values, v)):
            pages.index_copy_(1, slots, new[: len(slots)].transpose(0, 1))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite each page of `targets` with that of `sources`, in all layers."""
        device = self.data.device
        read, written = (upload(np.array(pages), device) for pages in (sources, targets))
        for layer in self.data:
            # [2, pages, page_size, K, D], or with keys, values and heads in one: [2 * K, pages,
            # page_size * D]
            pages = layer if self.flash else layer.view(2 * self.num_kv_heads, self.num_pages, -1)
            pages.index_copy_(1, written, pages.index_select(1, read))


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros; on the CPU of memory that the system clears when it is first touched, which most pages
    never are.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


class PagedAttention:
    """Writes the new keys and values of a step into the cache, then attends each new token to its
    own history.

    Call it as `attend(layer, q, k, v)` with q [T', H, D], k and v [T', K, D]: the new tokens of all
    sequences laid end to end, then padding up to the row tile.
    """

    def __init__(
        self, cache: KvCache, slots: Tensor, kernel: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.kernel = kernel

    @classmethod
    def chunks(
        cls,
        cache: KvCache,
        *,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        slots: NDArray[np.int64],
        num_heads: int,
    ) -> PagedAttention:
        """Any number of new tokens for each sequence.

        Shape: page_table [B, P] (any value where a sequence has no page; its first page stands in),
        starts [B] (tokens already in the cache), lengths [B] (new tokens, at least 1), slots [T]
        (where each new token's key goes).
        """
        device = cache.data.device
        kernel: PagedFlash | DecodeFlash | PagedSplits | _PagedBlocks
        if 0 < cache.split < (starts + lengths).max():
            kernel = PagedSplits(page_table, starts, lengths, cache.page_size, cache.split, device)
        elif cache.flash:
            kernel = flash_of_chunks(
                page_table, starts, lengths, cache.page_size, cache.handed_out, device
            )
        else:
            kernel = _PagedBlocks(cache, page_table, starts, lengths, num_heads)
        return cls(cache, upload(slots, device), kernel)

    @classmethod
    def decode(
        cls, cache: KvCache, *, pages: Tensor, num_keys: Tensor, slots: Tensor
    ) -> PagedAttention:
        """One new token for each sequence, all state on the GPU, for caches that FlashAttention
        reads.

        Shape: pages [B, P], P whole splits if the cache has them, and num_keys [B] (the new token's
        included) int32; slots [B] int64; slots below 0 write nothing.
        """
        if 0 < cache.split < pages.shape[1] * cache.page_size:
            splits = DecodeSplits(pages, num_keys, cache.handed_out, cache.page_size, cache.split)
            return cls(cache, slots, splits)
        return cls(cache, slots, DecodeFlash(pages, num_keys, cache.handed_out))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        return self.read(layer, q)

    def place(self, layer: int) -> KvPlace | None:
        """Where whoever calls `read` instead has written the keys and values, for caches that
        FlashAttention reads.
        """
        return KvPlace(*self.cache.layers[layer], self.slots) if self.cache.flash else None

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attention to what is in the cache."""
        return self.kernel(q, *self.cache.layers[layer])


class _PagedBlocks:
    """Pages laid out in rows, for `attention_of_rows`.

    Sequences are computed beside those of about as many rows and keys, so that few widen the
    others.
    """

    def __init__(
        self,
        cache: KvCache,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        num_heads: int,
    ) -> None:
        groups, device = num_heads // cache.num_kv_heads, cache.data.device
        first = np.cumsum(lengths) - lengths
        parts = _alike(lengths * groups, starts + lengths, device)
        self.parts = [
            _Part(cache, page_table[chosen], starts[chosen], lengths[chosen], first[chosen], groups)
            for chosen in (parts == part for part in np.unique(parts))
        ]
        self.order = token_order(lengths, parts, device) if len(self.parts) > 1 else None

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        outs = [part.attend(q, keys, values) for part in self.parts]
        return cut_rows(
            outs[0] if self.order is None else torch.cat(outs).index_select(0, self.order), len(q)
        )


def _alike(
    rows: NDArray[np.int64], keys: NDArray[np.int64], device: torch.device
) -> NDArray[np.int64]:
    """A number for each sequence, the same for those that are laid out together; all shape [B].

    On a CPU, where calls cost more than padding (by doublings, a rollout of the example takes 1.12
    times as long), those with one tile of rows are together, and all others are.
    """
    if device.type == "cpu":
        return (rows > QUERY_TILE).astype(np.int64)
    return np.unique(np.stack((doublings(rows), doublings(keys))), axis=1, return_inverse=True)[
        1
    ].reshape(-1)


class _Part:
    """Sequences of one step whose queries are laid out together."""

    def __init__(
        self,
        cache: KvCache,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        first: NDArray[np.int64],
        groups: int,
    ) -> None:
        device = cache.data.device
        self.layout = RowLayout.build(first, starts, lengths, groups, device)
        page_size = cache.page_size
        num_keys = int((starts + lengths).max())
        num_pages = -(-padded_rows(num_keys) // page_size)
        used = -(-(starts + lengths) // page_size)
        table = np.repeat(page_table[:, :1], num_pages, axis=1)
        width = min(num_pages, page_table.shape[1])
        table[:, :width] = np.where(
            np.arange(width) < used[:, None], page_table[:, :width], page_table[:, :1]
        )
        self.pages = torch.from_numpy(table.reshape(-1)).to(device)
        self.page_size = page_size

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = self.layout.rows(q, keys.shape[0])
        return self.layout.tokens(
            attention_of_rows(rows, self._read(keys), self._read(values), self.layout)
        )

    def _read(self, cached: Tensor) -> Tensor:
        """[K, slots, D] -> [K, B, S, D]."""
        num_kv_heads, _, dim = cached.shape
        pages = cached.view(num_kv_heads, -1, self.page_size * dim).index_select(1, self.pages)
        return pages.view(num_kv_heads, self.layout.batch, -1, dim)
