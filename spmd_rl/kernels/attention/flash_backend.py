"""Attention backend on FlashAttention-4; see `backend.AttentionBackend` for its methods."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention import flash, flash_tile
from spmd_rl.kernels.attention.flash import DecodeFlash, PackedFlash, PagedFlash, flash_of_chunks
from spmd_rl.kernels.attention.flash_partial import flash_partial
from spmd_rl.kernels.attention.flash_split_kv import DecodeSplits, PackedSplits, PagedSplits
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.rowwise.kv_write import KvSlots, write_kv
from spmd_rl.kernels.runtime.versions import FLASH


class FlashAttention:
    """FlashAttention-4 with an explicit mask, over all keys at once or in splits of `split` tokens.

    Pages lie one after the other: keys and values are [num_pages, page_size, K, D].
    """

    has_splits = True
    fits_prefill_graphs = True
    fuses_write = True
    has_deterministic_backward = True

    def __init__(self, head_dim: int, device: torch.device, split: int = 0) -> None:
        self._head_dim = head_dim
        self._device = device
        self._split = split

    @property
    def default_page_size(self) -> int:
        """The rows that a copy of keys or values brings whole."""
        return flash_tile.key_block(self._head_dim)

    @property
    def reads_codes(self) -> bool:
        return self._head_dim <= flash_tile.LARGE_HEAD

    def fits_cuda_graphs(self, page_size: int, heads_per_kv: int) -> bool:
        return True

    def facts(self) -> dict[str, str | int]:
        version = flash.flash_version()
        compared = "" if version == FLASH["flash-attn-4"] else ", version not compared"
        return {
            "attention": f"flash-attn-4 {version} causal, one split{compared}",
            "kv_block": self.default_page_size,
        }

    def packed(
        self, lengths: NDArray[np.int64], prefixes: NDArray[np.int32], heads_per_kv: int
    ) -> PackedFlash | PackedSplits:
        if 0 < self._split < lengths.max():
            return PackedSplits(lengths, self._split, self._device)
        return PackedFlash(lengths, self._device)

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Raises: ConfigError for a page size that the package does not take with such heads."""
        if head_dim > flash_tile.LARGE_HEAD and page_size != self.default_page_size:
            raise ConfigError(
                f"engine.page_size = {page_size}: with heads of {head_dim}, pages have "
                f"{self.default_page_size} tokens on a GPU; leave the setting out"
            )
        return num_pages, page_size, num_kv_heads, head_dim

    def by_page(self, layer: Tensor, num_pages: int) -> Tensor:
        return layer

    def write(self, target: KvSlots, k: Tensor, v: Tensor) -> None:
        write_kv(*target, k, v)

    def chunks(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        heads_per_kv: int,
        tile_counter: Tensor,
    ) -> PagedFlash | DecodeFlash | PagedSplits:
        if 0 < self._split < (starts + lengths).max():
            return PagedSplits(page_table, starts, lengths, page_size, self._split, self._device)
        return flash_of_chunks(page_table, starts, lengths, page_size, tile_counter, self._device)

    def decode(
        self,
        pages: Tensor,
        num_keys: Tensor,
        page_size: int,
        tile_counter: Tensor,
        exponents: KvExponents | None = None,
    ) -> DecodeFlash | DecodeSplits:
        if 0 < self._split < pages.shape[1] * page_size:
            if spare := -pages.shape[1] % (self._split // page_size):
                pages = pad(pages, (0, spare))  # no sequence sees the pages of a rest
            given = pages, num_keys, tile_counter
            return DecodeSplits(*given, page_size, self._split, exponents)
        return DecodeFlash(pages, num_keys, tile_counter, exponents)

    def prefill(
        self, pages: Tensor, num_keys: Tensor, bounds: Tensor, num_tokens: int
    ) -> PagedFlash:
        return PagedFlash(pages, num_keys, bounds, num_tokens, num_tokens)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        num_keys = torch.full((1,), len(k), device=q.device)
        out, log_sum = flash_partial(q[None], k[None], v[None], num_keys)
        return out[0], log_sum[0]
