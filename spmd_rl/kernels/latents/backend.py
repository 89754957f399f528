"""Attention to latents on GPUs; see `attention.backend.AttentionBackend` for the methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.row_tiles.tiles import (
    PAGE,
    PackedTiles,
    RowTiles,
    row_tiles,
    sequences_in_pages,
)
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from spmd_rl.kernels.runtime.capability import HOPPER
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.upload import upload

LARGEST = LatentSizes(512, 64)
LARGEST_IN_FLOAT32 = LatentSizes(128, 64)


class LatentKernels:
    """All heads attend to the one key of a token, whose last elements are its value.

    Pages lie one after the other: keys are [num_pages, 64, 1, D]. Values, a view of them, are not
    read.
    """

    default_page_size = PAGE
    has_splits = False
    reads_codes = False
    fits_prefill_graphs = True
    fuses_write = False
    has_deterministic_backward = True

    def __init__(
        self, key_dim: int, latent_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises: ConfigError for sizes and GPUs that no kernel is made for."""
        self._sizes = LatentSizes(latent_dim, key_dim - latent_dim)
        self._dtype = dtype
        self._device = device
        largest = LARGEST_IN_FLOAT32 if dtype == torch.float32 else LARGEST
        if any(size > most for size, most in zip(self._sizes, largest, strict=True)):
            raise ConfigError(
                f"attention to latents of {self._sizes.latent} beside {self._sizes.rotary} rotary "
                f"elements in {dtype}: kernels of GPUs take at most {largest.latent} beside "
                f"{largest.rotary}, and {LARGEST.latent} in bfloat16"
            )
        if torch.cuda.get_device_capability(device)[0] < HOPPER:
            raise ConfigError("attention to latents needs the shared memory of a Hopper GPU")

    def fits_cuda_graphs(self, page_size: int, heads_per_kv: int) -> bool:
        return self._dtype == torch.bfloat16  # else experts' rows are counted on the host

    def facts(self) -> dict[str, str | int]:
        from spmd_rl.kernels.latents.attend_triton import latent_tile

        compared = torch.cuda.get_device_capability(self._device)[0] == HOPPER
        tile = latent_tile(self._dtype)
        return {
            "attention": "latents in ascending blocks" + ("" if compared else ", not compared"),
            "attention_tile": ", ".join(map(str, tile)),
        }

    def packed(
        self, lengths: NDArray[np.int64], prefixes: NDArray[np.int32], heads_per_kv: int
    ) -> PackedLatents:
        return PackedLatents(lengths, self._sizes, self._device)

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Raises: ConfigError for another page size than that of the kernels."""
        if page_size != PAGE:
            raise ConfigError(
                f"engine.page_size = {page_size}: with latents, pages have {PAGE} tokens on a GPU; "
                "leave the setting out"
            )
        return num_pages, page_size, num_kv_heads, head_dim

    def by_page(self, layer: Tensor, num_pages: int) -> Tensor:
        return layer

    def write(self, target: KvSlots, k: Tensor, v: Tensor) -> None:
        from spmd_rl.kernels.rowwise.kv_write_triton import write_rows

        write_rows(target.keys, None, target.slots, k, k, None)

    def chunks(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        heads_per_kv: int,
        tile_counter: Tensor,
    ) -> PagedLatents:
        arrays = page_table, starts + lengths, np.array([0, *np.cumsum(lengths)])
        pages, num_keys, bounds = (upload(one, self._device) for one in arrays)
        return PagedLatents(pages, num_keys, bounds, int(lengths.sum()), self._sizes)

    def decode(
        self,
        pages: Tensor,
        num_keys: Tensor,
        page_size: int,
        tile_counter: Tensor,
        exponents: KvExponents | None = None,
    ) -> PagedLatents:
        batch = len(num_keys)
        bounds = torch.arange(batch + 1, device=num_keys.device)
        return PagedLatents(pages, num_keys, bounds, batch, self._sizes)

    def prefill(
        self, pages: Tensor, num_keys: Tensor, bounds: Tensor, num_tokens: int
    ) -> PagedLatents:
        return PagedLatents(pages, num_keys, bounds, num_tokens, self._sizes)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = k[:, 0].float(), v[:, 0].float()
        scores = q.float() @ keys.T * q.shape[-1] ** -0.5
        return scores.softmax(-1) @ values, scores.logsumexp(-1)


class PagedLatents:
    """Attention of each new token to its sequence's pages, up to itself.

    Shape: q [T', H, D], keys [num_pages, 64, 1, D]; the result [T', H, C] is unset beyond
    `num_tokens`. `pages` [B, P], `num_keys` [B] and `bounds` [B + 1] as in `Sequences`.
    """

    def __init__(
        self,
        pages: Tensor,
        num_keys: Tensor,
        bounds: Tensor,
        num_tokens: int,
        sizes: LatentSizes,
    ) -> None:
        self._given = sequences_in_pages(pages, num_keys, bounds, PAGE)
        self._num_tokens = num_tokens
        self._sizes = sizes
        self._tiles: RowTiles | None = None

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        from spmd_rl.kernels.latents.attend_triton import attend_to_latents, latent_tile

        if self._tiles is None:
            height = latent_tile(q.dtype).rows
            self._tiles = row_tiles(self._given, q.shape[1], height, self._num_tokens)
        return attend_to_latents(q, keys.view(-1, q.shape[-1]), self._tiles, self._sizes)[0]


class PackedLatents:
    """Causal attention within sequences laid end to end, differentiable.

    Values are the last elements of keys: gradients of both are those of keys.
    Shape: q [T', H, D], k [T', 1, D], T' the number of tokens or that padded to the row tile.
    """

    def __init__(
        self, lengths: NDArray[np.int64], sizes: LatentSizes, device: torch.device
    ) -> None:
        self._sizes = sizes
        self._tiles = PackedTiles(lengths, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from spmd_rl.kernels.latents.attend_triton import latent_tile

        tiles = self._tiles.of(len(q), q.shape[1], latent_tile(q.dtype).rows)
        return call(_PackedLatents, q, k, tiles, self._sizes)


class _PackedLatents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, tiles: tuple[RowTiles, RowTiles], sizes: LatentSizes
    ) -> Tensor:
        from spmd_rl.kernels.latents.attend_triton import attend_to_latents

        q, keys = dense(q), dense(k[:, 0])
        out, log_sum = attend_to_latents(q, keys, tiles[0], sizes)
        ctx.save_for_backward(q, keys, out, log_sum)
        ctx.tiles, ctx.sizes = tiles, sizes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from spmd_rl.kernels.latents.gradients_triton import AttendedRows, latent_gradients

        q, keys, out, log_sum = ctx.saved_tensors
        rows, blocks = ctx.tiles
        kept = AttendedRows(q, keys, out, log_sum, dense(grads[0]))
        grad_q, grad_k = latent_gradients(kept, rows, blocks, ctx.sizes)
        return grad_q, grad_k.unsqueeze(1), None, None
