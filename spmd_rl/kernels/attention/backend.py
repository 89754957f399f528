"""Choice of the attention kernels: FlashAttention-4 where it was verified, else our blocked ones.

This is the one place that decides. A backend knows the cache's memory layout, the kernels for
packed sequences and for pages, and the facts that its bits depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.blocked_backend import BlockedAttention
from spmd_rl.kernels.attention.flash import FLASH_HEAD_DIMS, flash_supports
from spmd_rl.kernels.attention.flash_backend import FlashAttention
from spmd_rl.kernels.latents.backend import LatentKernels
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from spmd_rl.kernels.unproven import refuse_unproven

# of q, and keys and values to read, and a reach if it is not whole (`token_attention.attend`)
AttentionKernel = Callable[..., Tensor]


class AttentionBackend(Protocol):
    """Kernels of one kind for training and generation; one sequence has the same bits in both.

    Shape letters: B sequences, T new tokens, H heads, K key-value heads, D head size, P pages of a
    sequence.
    """

    has_splits: bool  # whether it can attend to a sequence's keys in splits of a fixed size
    fits_prefill_graphs: bool  # whether `prefill` exists: all its inputs are on the device
    fuses_write: bool  # whether one kernel can rotate keys and write them into the cache
    has_deterministic_backward: bool  # whether gradients can be summed in a fixed order

    @property
    def default_page_size(self) -> int:
        """Tokens of a page of the cache where the config names none."""

    @property
    def reads_codes(self) -> bool:
        """Whether `decode` takes pages of codes, one of which is a block of keys."""

    def fits_cuda_graphs(self, page_size: int, heads_per_kv: int) -> bool:
        """Whether `decode` exists for such pages and heads: all its inputs are on the device."""

    def facts(self) -> dict[str, str | int]:
        """Return the part of the numeric contract that describes attention."""

    def packed(
        self, lengths: NDArray[np.int64], prefixes: NDArray[np.int32], heads_per_kv: int
    ) -> AttentionKernel:
        """Return the differentiable kernel for sequences laid end to end; see `PackedAttention`."""

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return the shape of one layer's keys, and of its values if it keeps any."""

    def by_page(self, layer: Tensor, num_pages: int) -> Tensor:
        """View n arrays of one layer, [n, *cache_shape], as [N, num_pages, ...]."""

    def write(self, target: KvSlots, k: Tensor, v: Tensor) -> None:
        """Write the first T rows of k and v [T', K, D] into the slots [T] of one layer."""

    def chunks(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        heads_per_kv: int,
        tile_counter: Tensor,
    ) -> AttentionKernel:
        """Return the kernel for `lengths` [B] new tokens after `starts` [B] cached ones.

        Entries of `page_table` [B, P] past a sequence's end may hold anything.
        """

    def decode(
        self,
        pages: Tensor,
        num_keys: Tensor,
        page_size: int,
        tile_counter: Tensor,
        exponents: KvExponents | None = None,
    ) -> AttentionKernel:
        """Return the kernel for one new token of each sequence, whose pages are on the device.

        With `exponents`, pages are codes with these scales, where `reads_codes` says so.
        """

    def prefill(
        self, pages: Tensor, num_keys: Tensor, bounds: Tensor, num_tokens: int
    ) -> AttentionKernel:
        """Return the kernel for at most `num_tokens` new tokens, with all inputs on the device.

        Sequence i has the tokens from `bounds[i]` to `bounds[i + 1]`.
        """

    def one_query(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from one query [H, D] to keys and values [S, K, D]; for diagnosis only.

        Returns the output [H, D] and the log of its softmax's denominator [H], in fp32.
        """


def attention_backend(
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    split: int = 0,
    latent_dim: int = 0,
) -> AttentionBackend:
    """Choose the backend for heads of `head_dim` in `dtype` on `device`.

    `split` is the size in tokens of the splits of keys (kv_splits.py); 0 attends to all at once.
    With `latent_dim`, the last so many elements of keys are their values.
    Raises: ConfigError if splits are asked for where they cannot run, and for latents that no
    kernel of a GPU takes.
    """
    if latent_dim and device.type == "cuda" and not split:
        refuse_unproven("attention to latents")
        return LatentKernels(head_dim, latent_dim, dtype, device)
    if not latent_dim and flash_supports(head_dim, dtype, device):
        return FlashAttention(head_dim, device, split)
    if split:
        raise ConfigError(
            f"attention_split = {split} needs flash-attn-4 installed, bfloat16 on a Hopper GPU, "
            f"and heads of {', '.join(map(str, FLASH_HEAD_DIMS))} with values of their own; "
            f"here are {dtype} on {device.type} and heads of {head_dim}"
        )
    return BlockedAttention(head_dim, dtype, device)


def latent_dim_of(k: Tensor, v: Tensor) -> int:
    """Return how many last elements of keys are their values; 0 where values are apart."""
    return v.shape[-1] if v.shape[-1] < k.shape[-1] else 0
