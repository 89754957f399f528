"""FlashAttention-4 over splits of keys of a fixed size (kv_splits.py), packed and paged.

A token sees its own split up to itself, and earlier splits whole. The package counts its blocks of
keys from the start of each split. So a token's result there does not depend on how many tokens are
computed with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.flash import (
    SequenceBounds,
    VarlenArguments,
    flash_forward,
    flash_gradients,
    pages_in_use,
    to_int32,
)
from spmd_rl.kernels.attention.flash_decode import decode_attention
from spmd_rl.kernels.attention.kv_splits import KvSplits
from spmd_rl.kernels.attention.merge_states import merge_states
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.runtime.padding import padded_rows
from spmd_rl.kernels.runtime.upload import upload


class _EarlierSplits:
    """The pairs of `KvSplits` on the device; `keys` locates the keys of each pair."""

    def __init__(
        self, splits: KvSplits, size: int, keys: VarlenArguments, device: torch.device
    ) -> None:
        self.queries, self.rows = (upload(x, device) for x in (splits.queries, splits.rows))
        self.arguments = keys | {
            "cu_seqlens_q": to_int32([0, *np.cumsum(splits.pair_lengths)], device),
            "max_seqlen_q": int(splits.pair_lengths.max()),
            "seqused_k": to_int32(np.full(len(splits.pair_split), size), device),
        }

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: VarlenArguments,
        out: Tensor,
        log_sum: Tensor | None = None,
    ) -> None:
        """Attend from each token to its own split, which `own` locates, and to all earlier ones.

        Shape: q and out [T', H, D], or without padding [T, H, D]; log_sum [T', H] fp32.
        """
        (num_rows, heads, dim), num_own = q.shape, len(self.rows)
        partial = q.new_empty(num_own + len(self.queries), heads, dim)
        sums = q.new_empty(heads, len(partial), dtype=torch.float32)
        flash_forward(q, k, v, partial[:num_rows], sums[:, :num_rows], causal=True, **own)
        repeated = q.index_select(0, self.queries)
        flash_forward(
            repeated, k, v, partial[num_own:], sums[:, num_own:], causal=False, **self.arguments
        )
        merge_states(partial, sums.t(), self.rows[:num_rows], out, log_sum)


class PackedSplits:
    """`PackedFlash` in splits, for a call in which some sequence has more than one split."""

    def __init__(self, lengths: NDArray[np.int64], size: int, device: torch.device) -> None:
        num_tokens = int(lengths.sum())
        splits = KvSplits.of(
            np.zeros_like(lengths), lengths, size, padded_rows(num_tokens) - num_tokens
        )
        first_keys = (np.cumsum(lengths) - lengths)[
            splits.sequence[splits.pair_run]
        ] + splits.pair_split * size
        keys = {"cu_seqlens_k": to_int32([*first_keys, 0], device), "max_seqlen_k": size}
        self.earlier = _EarlierSplits(splits, size, keys, device)
        self.runs, self.sequences = (
            SequenceBounds(splits.lengths, device),
            SequenceBounds(lengths, device),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach = WHOLE) -> Tensor:
        _refuse(reach)
        out: Tensor = _PackedSplitAttention.apply(q, k, v, self)
        return out


class _PackedSplitAttention(torch.autograd.Function):
    """Merged splits are attention over all keys, so the package's gradient needs no splits."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSplits) -> Tensor:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        packed.earlier.attend(q, k, v, packed.runs.arguments(len(q)), out, log_sum.t())
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.arguments = packed.sequences.arguments(len(q))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *flash_gradients(ctx, grads[0]), None


class PagedSplits:
    """`PagedFlash` in splits, for a call in which some sequence has more than one split."""

    def __init__(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        size: int,
        device: torch.device,
    ) -> None:
        splits = KvSplits.of(starts, lengths, size)
        pages = pages_in_use(page_table, starts + lengths, page_size)
        pages = np.pad(pages, ((0, 0), (0, -pages.shape[1] % (size // page_size))), mode="edge")
        by_split = pages.reshape(len(pages), -1, size // page_size)
        table = by_split[splits.sequence[splits.pair_run], splits.pair_split]
        self.earlier = _EarlierSplits(splits, size, {"page_table": to_int32(table, device)}, device)
        self.num_tokens = int(lengths.sum())
        self.own: VarlenArguments = {
            "page_table": to_int32(by_split[splits.sequence, splits.split], device),
            "seqused_k": to_int32(splits.num_keys, device),
            "cu_seqlens_q": to_int32([0, *np.cumsum(splits.lengths)], device),
            "max_seqlen_q": int(splits.lengths.max()),
        }

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, reach: Reach = WHOLE) -> Tensor:
        _refuse(reach)
        out, new = q.new_empty(q.shape), slice(self.num_tokens)
        self.earlier.attend(q[new], keys, values, self.own, out[new])
        return out


class DecodeSplits:
    """`DecodeFlash` in splits, each of which is a sequence of the batch.

    Splits past the end of their sequence have no keys.
    Shape: pages [B, N * size / page_size] and num_keys [B] int32; `tile_counter` and `exponents` as
    in `decode_attention`.
    """

    def __init__(
        self,
        pages: Tensor,
        num_keys: Tensor,
        tile_counter: Tensor,
        page_size: int,
        size: int,
        exponents: KvExponents | None = None,
    ) -> None:
        self.tile_counter = tile_counter
        self.exponents = exponents
        self.batch, self.pages = len(pages), pages.reshape(-1, size // page_size)
        split = torch.arange(len(self.pages) // self.batch, dtype=torch.int32, device=pages.device)
        keys = (num_keys.unsqueeze(1) - split * size).clamp_(0, size)
        rows = torch.arange(len(self.pages), dtype=torch.int32, device=pages.device).view(
            keys.shape
        )
        self.num_keys, self.rows = keys.view(-1), rows.masked_fill_(keys == 0, -1)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, reach: Reach = WHOLE) -> Tensor:
        _refuse(reach)
        partial = q.new_empty(len(self.pages), *q.shape[1:])
        sums = q.new_empty(partial.shape[:2], dtype=torch.float32)
        decode_attention(
            q[: self.batch],
            keys,
            values,
            self.pages,
            self.num_keys,
            self.tile_counter,
            partial,
            sums,
            self.exponents,
        )
        out = q.new_empty(q.shape)
        merge_states(partial, sums, self.rows, out[: self.batch])
        return out


def _refuse(reach: Reach) -> None:
    """Raises: ConfigError for windows and sinks."""
    if not reach.is_whole:
        raise ConfigError("attention_split does not go with windows or sinks: set it to 0")
