"""Attention backend on our own blocked kernels; see `backend.AttentionBackend` for its methods."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention import blocked, row_layout
from spmd_rl.kernels.attention.blocked_batches import PackedBlocks, PagedBlocks
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from spmd_rl.kernels.runtime.capability import HOPPER


class BlockedAttention:
    """Keys in ascending blocks, on the CPU and on GPUs where FlashAttention-4 does not run.

    Heads lie one after the other: keys and values are [K, num_pages * page_size, D].
    """

    default_page_size = 16
    has_splits = False
    reads_codes = False
    fits_prefill_graphs = False
    fuses_write = False

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self.has_deterministic_backward = device.type == "cpu"

    def fits_cuda_graphs(self, page_size: int, heads_per_kv: int) -> bool:
        return False

    def facts(self) -> dict[str, str | int]:
        if self._device.type == "cpu":
            return {
                "attention": "blocked",
                "kv_block": blocked.KV_BLOCK,
                "query_tile": row_layout.QUERY_TILE,
            }
        from spmd_rl.kernels.attention.blocked_triton import block_tile

        compared = torch.cuda.get_device_capability(self._device)[0] == HOPPER
        tile = block_tile(self._dtype, self._head_dim)
        return {
            "attention": "keys in ascending blocks" + ("" if compared else ", not compared"),
            "attention_tile": ", ".join(map(str, tile)),
        }

    def packed(
        self, lengths: NDArray[np.int64], prefixes: NDArray[np.int32], heads_per_kv: int
    ) -> PackedBlocks:
        return PackedBlocks(lengths, prefixes, heads_per_kv, self._device)

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return num_kv_heads, num_pages * page_size, head_dim

    def by_page(self, layer: Tensor, num_pages: int) -> Tensor:
        return layer.view(layer.shape[0] * layer.shape[1], num_pages, -1)

    def write(self, target: KvSlots, k: Tensor, v: Tensor) -> None:
        for cached, new in ((target.keys, k), (target.values, v)):
            cached.index_copy_(1, target.slots, new[: len(target.slots)].transpose(0, 1))

    def chunks(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        heads_per_kv: int,
        tile_counter: Tensor,
    ) -> PagedBlocks:
        return PagedBlocks(page_table, starts, lengths, page_size, heads_per_kv, self._device)

    def decode(
        self,
        pages: Tensor,
        num_keys: Tensor,
        page_size: int,
        tile_counter: Tensor,
        exponents: KvExponents | None = None,
    ) -> NoReturn:
        raise NotImplementedError("blocked attention reads its page table on the host: use chunks")

    def prefill(self, pages: Tensor, num_keys: Tensor, bounds: Tensor, num_tokens: int) -> NoReturn:
        raise NotImplementedError("blocked attention reads its page table on the host: use chunks")

    def one_query(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads_per_kv = q.shape[0] // k.shape[1]
        k, v = (x.repeat_interleave(heads_per_kv, 1).transpose(0, 1).float() for x in (k, v))
        scores = (k @ q.float().unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
        return (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1), scores.logsumexp(-1)
