"""Attention of the engine: keys and values in pages, read back in the trainer's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.backend import AttentionKernel, attention_backend
from spmd_rl.kernels.attention.token_attention import TokenAttention
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from spmd_rl.kernels.rowwise.rope import qk_norm_rope_into
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.runtime.upload import upload


class KvCache:
    """Pages of keys and values for every layer; slot = page * page_size + offset.

    The cache starts at zero, and it and products with its keys must stay finite: unused slots of a
    page are read, and their values are multiplied by exact zeros. `backend` lays out its memory.
    `allocate` returns that many bytes, uint8 and zero. `split` is the size of the splits of keys in
    tokens, a multiple of the page (kv_splits.py); 0 for none. One stream at a time may read the
    cache, because its calls share `tile_counter`.
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
        self.backend = attention_backend(head_dim, dtype, device, split)
        self.split = split
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.tile_counter = torch.zeros(1, dtype=torch.int32, device=device)
        layer_shape = self.backend.cache_shape(num_pages, page_size, num_kv_heads, head_dim)
        shape = (num_layers, 2, *layer_shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = _zeros(num_bytes, device) if allocate is None else allocate(num_bytes)
        self.data = memory.view(dtype).view(shape)
        self.layers = [(layer[0], layer[1]) for layer in self.data]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new keys and values. Shape: slots [T]; of k and v [T', K, D] the first T rows."""
        self.backend.write(KvSlots(*self.layers[layer], slots), k, v)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite each page of `targets` with that of `sources`, in all layers."""
        device = self.data.device
        read, written = (upload(np.array(pages), device) for pages in (sources, targets))
        for layer in self.data:
            pages = self.backend.by_page(layer, self.num_pages)
            pages.index_copy_(1, written, pages.index_select(1, read))


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate zeros.

    On the CPU the system clears a page when it is first touched, which most never are.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


class PagedAttention(TokenAttention):
    """Attention of a step's new tokens, each to its own history in the cache.

    A call writes the new keys and values into the cache first. Shape: q [T', H, D], k and v [T', K,
    D]: the new tokens of all sequences laid end to end, then padding up to the row tile.
    """

    def __init__(self, cache: KvCache, slots: Tensor, kernel: AttentionKernel) -> None:
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
        """Prepare a step with any number of new tokens for each sequence.

        Shape: page_table [B, P] (any value where a sequence has no page; its first page stands in),
        starts [B] (tokens already in the cache), lengths [B] (new tokens, at least 1), slots [T]
        (where each new token's key goes).
        """
        heads_per_kv = num_heads // cache.num_kv_heads
        kernel = cache.backend.chunks(
            page_table, starts, lengths, cache.page_size, heads_per_kv, cache.tile_counter
        )
        return cls(cache, upload(slots, cache.data.device), kernel)

    @classmethod
    def decode(
        cls, cache: KvCache, *, pages: Tensor, num_keys: Tensor, slots: Tensor
    ) -> PagedAttention:
        """Prepare a step with one new token for each sequence; all state is on the GPU.

        Only for backends that fit CUDA graphs. Shape: pages [B, P], P whole splits if the cache has
        them, and num_keys [B] (the new token's included) int32; slots [B] int64, which write
        nothing where they are below 0.
        """
        kernel = cache.backend.decode(pages, num_keys, cache.page_size, cache.tile_counter)
        return cls(cache, slots, kernel)

    @classmethod
    def prefill(
        cls, cache: KvCache, *, pages: Tensor, num_keys: Tensor, bounds: Tensor, slots: Tensor
    ) -> PagedAttention:
        """Prepare a step with at most T new tokens, all state being on the GPU.

        Only for backends that fit CUDA graphs, and for sequences within one split. Shape: pages [B,
        P], num_keys [B] and bounds [B + 1] int32, where each sequence's new tokens begin and end;
        slots [T] int64, which write nothing where they are below 0.
        """
        kernel = cache.backend.prefill(pages, num_keys, bounds, len(slots))
        return cls(cache, slots, kernel)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        return self.read(layer, q)

    def rotate_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm: QkNorm, rotary: Rotary
    ) -> Tensor:
        if torch.is_grad_enabled() or not self.cache.backend.fuses_write:
            return super().rotate_and_attend(layer, q, k, v, norm, rotary)
        target = KvSlots(*self.cache.layers[layer], self.slots)
        return self.read(layer, qk_norm_rope_into(q, k, v, norm, rotary, target))

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attend to what is in the cache, the new keys and values included."""
        return self.kernel(q, *self.cache.layers[layer])
