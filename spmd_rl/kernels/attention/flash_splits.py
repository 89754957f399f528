"""FlashAttention-4 over keys in splits of a fixed size, for packed sequences and for pages of a
cache.

A token sees its own split up to itself, and those before it whole. The package counts its blocks of
keys from the start of each split, so what a token finds there does not depend on how many tokens
came with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.flash import Laid, Where, flash_forward, pages_in_use, to_int32
from spmd_rl.kernels.attention.flash_decode import decode_attention
from spmd_rl.kernels.attention.merge_states import merge_ranges
from spmd_rl.kernels.attention.splits import Splits
from spmd_rl.kernels.runtime.padding import padded_rows
from spmd_rl.kernels.runtime.upload import upload


class _Earlier:
    """The pairs of `Splits` on the device; `keys` says where the package finds the keys of each."""

    def __init__(self, splits: Splits, size: int, keys: Where, device: torch.device) -> None:
        self.queries, self.rows = (upload(x, device) for x in (splits.queries, splits.rows))
        self.where = keys | {
            "cu_seqlens_q": to_int32([0, *np.cumsum(splits.pair_lengths)], device),
            "max_seqlen_q": int(splits.pair_lengths.max()),
            "seqused_k": to_int32(np.full(len(splits.pair_split), size), device),
        }

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: Where,
        out: Tensor,
        log_sum: Tensor | None = None,
    ) -> None:
        """Each token over its own split, found by `own`, and all earlier ones.

        Shape: q and out [T', H, D], or without padding [T, H, D]; log_sum [T', H] fp32.
        """
        (num_rows, heads, dim), num_own = q.shape, len(self.rows)
        partial = q.new_empty(num_own + len(self.queries), heads, dim)
        sums = q.new_empty(heads, len(partial), dtype=torch.float32)
        flash_forward(q, k, v, partial[:num_rows], sums[:, :num_rows], causal=True, **own)
        again = q.index_select(0, self.queries)
        flash_forward(again, k, v, partial[num_own:], sums[:, num_own:], causal=False, **self.where)
        merge_ranges(partial, sums.t(), self.rows[:num_rows], out, log_sum)


class PackedSplits:
    """As `PackedFlash`, in splits, of which at least one sequence has more than one."""

    def __init__(self, lengths: NDArray[np.int64], size: int, device: torch.device) -> None:
        num_tokens = int(lengths.sum())
        splits = Splits.of(
            np.zeros_like(lengths), lengths, size, padded_rows(num_tokens) - num_tokens
        )
        first_keys = (np.cumsum(lengths) - lengths)[
            splits.sequence[splits.pair_run]
        ] + splits.pair_split * size
        keys = {"cu_seqlens_k": to_int32([*first_keys, 0], device), "max_seqlen_k": size}
        self.earlier = _Earlier(splits, size, keys, device)
        self.runs, self.whole = Laid(splits.lengths, device), Laid(lengths, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _PackedSplitAttention.apply(q, k, v, self)
        return out


class _PackedSplitAttention(torch.autograd.Function):
    """Splits merged are attention over all keys: the gradient is the package's, of the sequences
    uncut.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSplits) -> Tensor:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        packed.earlier.attend(q, k, v, packed.runs.where(len(q)), out, log_sum.t())
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.whole = packed.whole.where(len(q))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, out, log_sum = ctx.saved_tensors
        repeats = torch.are_deterministic_algorithms_enabled()
        given = q, k, v, out, grads[0].contiguous(), log_sum
        return *_flash_attn_bwd(*given, causal=True, deterministic=repeats, **ctx.whole), None


class PagedSplits:
    """As `PagedFlash`, in splits, of which at least one sequence has more than one."""

    def __init__(
        self,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page_size: int,
        size: int,
        device: torch.device,
    ) -> None:
        splits = Splits.of(starts, lengths, size)
        pages = pages_in_use(page_table, starts + lengths, page_size)
        pages = np.pad(pages, ((0, 0), (0, -pages.shape[1] % (size // page_size))), mode="edge")
        by_split = pages.reshape(len(pages), -1, size // page_size)
        table = by_split[splits.sequence[splits.pair_run], splits.pair_split]
        self.earlier = _Earlier(splits, size, {"page_table": to_int32(table, device)}, device)
        self.num_tokens = int(lengths.sum())
        self.own: Where = {
            "page_table": to_int32(by_split[splits.sequence, splits.split], device),
            "seqused_k": to_int32(splits.num_keys, device),
            "cu_seqlens_q": to_int32([0, *np.cumsum(splits.lengths)], device),
            "max_seqlen_q": int(splits.lengths.max()),
        }

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out, new = q.new_empty(q.shape), slice(self.num_tokens)
        self.earlier.attend(q[new], keys, values, self.own, out[new])
        return out


class DecodeSplits:
    """As `DecodeFlash`, in splits: each of them is a sequence of the batch, without keys past its
    sequence's end.

    Shape: pages [B, N * size / page_size] and num_keys [B] int32; tile_counter as in
    `decode_attention`.
    """

    def __init__(
        self, pages: Tensor, num_keys: Tensor, tile_counter: Tensor, page_size: int, size: int
    ) -> None:
        self.tile_counter = tile_counter
        self.batch, self.pages = len(pages), pages.reshape(-1, size // page_size)
        split = torch.arange(len(self.pages) // self.batch, dtype=torch.int32, device=pages.device)
        keys = (num_keys.unsqueeze(1) - split * size).clamp_(0, size)
        rows = torch.arange(len(self.pages), dtype=torch.int32, device=pages.device).view(
            keys.shape
        )
        self.num_keys, self.rows = keys.view(-1), rows.masked_fill_(keys == 0, -1)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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
        )
        out = q.new_empty(q.shape)
        merge_ranges(partial, sums, self.rows, out[: self.batch])
        return out
