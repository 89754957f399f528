"""Attention over keys and values in 8 bits, on the kernels of another backend.

The cache holds codes. The other backend's kernel for decoding may read them. Before any other reads
them, those of the pages in use are decoded into a copy in the dtype of queries, one layer at a
time, and the other backend attends to that copy. The trainer rounds keys and values through the
same codes. So all attend to the same numbers, with sums in the same order.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.backend import AttentionBackend, AttentionKernel
from spmd_rl.kernels.attention.flash import pages_in_use, to_int32
from spmd_rl.kernels.attention.flash_decode import is_rebuilt
from spmd_rl.kernels.attention.flash_tile import LARGE_HEAD
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach, attend
from spmd_rl.kernels.low_precision.kv_codes import (
    KvCoding,
    KvExponents,
    decode_pages,
    of_both,
    round_kv,
)
from spmd_rl.kernels.rowwise.kv_write import KvSlots, codes_of, write_kv
from spmd_rl.kernels.runtime.upload import upload

NO_GRAPHS = "pages of codes are decoded for new tokens of prompts: use chunks"


def with_codes(
    backend: AttentionBackend, exponents: KvExponents | None, device: torch.device
) -> AttentionBackend:
    """Return `backend` for keys and values in 8 bits with these scales; itself without any."""
    return backend if exponents is None else CodedAttention(backend, exponents, device)


class CodedAttention:
    """A backend whose cache holds codes; see `backend.AttentionBackend` for its methods.

    `coding` counts the elements of keys and values that were written.
    """

    fits_prefill_graphs = False

    def __init__(
        self, backend: AttentionBackend, exponents: KvExponents, device: torch.device
    ) -> None:
        self._backend = backend
        self._exponents = exponents
        self._device = device
        self.reads_codes = backend.reads_codes
        self.fuses_write = backend.fuses_write
        self.default_page_size = backend.default_page_size
        self.has_splits = backend.has_splits
        self.has_deterministic_backward = backend.has_deterministic_backward
        self.coding = KvCoding(exponents, torch.zeros(2, dtype=torch.int64, device=device))

    def fits_cuda_graphs(self, page_size: int, heads_per_kv: int) -> bool:
        # no larger heads have codes that are read
        return self.reads_codes and is_rebuilt(page_size, heads_per_kv, LARGE_HEAD)

    def facts(self) -> dict[str, str | int]:
        return self._backend.facts()

    def packed(
        self, lengths: NDArray[np.int64], prefixes: NDArray[np.int32], heads_per_kv: int
    ) -> AttentionKernel:
        kernel = self._backend.packed(lengths, prefixes, heads_per_kv)
        return lambda q, k, v, reach=WHOLE: attend(
            kernel, q, *of_both(round_kv, k, v, self._exponents), reach
        )

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return self._backend.cache_shape(num_pages, page_size, num_kv_heads, head_dim)

    def by_page(self, layer: Tensor, num_pages: int) -> Tensor:
        return self._backend.by_page(layer, num_pages)

    def write(self, target: KvSlots, k: Tensor, v: Tensor) -> None:
        if self.fuses_write:
            write_kv(*target, k, v, self.coding)
            return
        k, v = k[: len(target.slots)], v[: len(target.slots)]
        self._backend.write(target, *codes_of(k, v, self.coding))

    def chunks(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        heads_per_kv: int,
        tile_counter: Tensor,
    ) -> AttentionKernel:
        """Decode the pages in use, unless a kernel reads codes.

        Where none does, single new tokens are decoded over the copy, by a kernel that may begin
        early. The launch just ahead makes the copy, and `pdl` does not promise that it is seen. No
        run has shown it missing.
        """
        ends = starts + lengths
        if lengths.max() == 1 and self.fits_cuda_graphs(page_size, heads_per_kv):
            table = pages_in_use(page_table, ends, page_size)
            pages, num_keys = (to_int32(one, self._device) for one in (table, ends))
            return self.decode(pages, num_keys, page_size, tile_counter)
        used = -(-ends // page_size)
        is_used = np.arange(page_table.shape[1]) < used[:, None]
        chosen, places = np.unique(page_table[is_used], return_inverse=True)
        table = np.zeros_like(page_table)
        table[is_used] = places
        kernel = self._backend.chunks(table, starts, lengths, page_size, heads_per_kv, tile_counter)
        at = upload(chosen, self._device)
        return _DecodedPages(self._backend, self._exponents, kernel, at, page_size, heads_per_kv)

    def decode(
        self,
        pages: Tensor,
        num_keys: Tensor,
        page_size: int,
        tile_counter: Tensor,
        exponents: KvExponents | None = None,
    ) -> AttentionKernel:
        assert exponents is None, "a cache of codes has scales of its own"
        given = pages, num_keys, page_size, tile_counter
        return self._backend.decode(*given, self._exponents)

    def prefill(self, pages: Tensor, num_keys: Tensor, bounds: Tensor, num_tokens: int) -> NoReturn:
        raise NotImplementedError(NO_GRAPHS)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._backend.one_query(q, k, v)


class _DecodedPages:
    """Kernel of `chunks`: attention of `kernel` to a decoded copy of the pages in use.

    Shape: pages [U] int64, the pages in the order in which `kernel` knows them.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        exponents: KvExponents,
        kernel: AttentionKernel,
        pages: Tensor,
        page_size: int,
        heads_per_kv: int,
    ) -> None:
        self._backend = backend
        self._exponents = exponents
        self._kernel = kernel
        self._pages = pages
        self._page_size = page_size
        self._heads_per_kv = heads_per_kv

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, reach: Reach = WHOLE) -> Tensor:
        decoded = of_both(partial(self._decoded, q), keys, values, self._exponents)
        return attend(self._kernel, q, *decoded, reach)

    def _decoded(self, q: Tensor, codes: Tensor, exponent: int) -> Tensor:
        heads, dim = q.shape[1] // self._heads_per_kv, q.shape[2]
        num_pages = codes.numel() // (self._page_size * heads * dim)
        by_page = self._backend.by_page(codes.unsqueeze(0), num_pages)
        shape = self._backend.cache_shape(len(self._pages), self._page_size, heads, dim)
        return decode_pages(by_page, self._pages, exponent, q.dtype).view(shape)
