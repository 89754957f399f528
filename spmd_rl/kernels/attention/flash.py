"""FlashAttention-4 for packed sequences and for pages of a cache.

Both call the same kernel with an explicit mask and one split. For one new token that kernel is
rebuilt (`flash_decode_cute`). So a query's bits depend on its own history alone, as measured on
Hopper (docs/numerics.md).
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.flash_decode import decode_attention
from spmd_rl.kernels.attention.flash_tile import LARGE_HEAD, TRAINING_ROWS, key_block
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.runtime.capability import HOPPER
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import padded_rows
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.kernels.runtime.versions import installed
from spmd_rl.kernels.windows.sinks import gradient_of_sinks, with_sinks
from spmd_rl.kernels.windows.windows import PackedWindows, PagedWindows

VarlenArguments = dict[
    str, Any
]  # arguments by which the package finds each sequence's queries and keys
# Heads of 80 are left out: the forward pass agrees, but 4.0.0b19 gives wrong gradients on Hopper.
FLASH_HEAD_DIMS = (32, 64, 96, 128, 256)


@cache
def flash_version() -> str | None:
    """Return the version of FlashAttention-4 if it is installed and the GPU is a Hopper."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        return None
    return installed("flash-attn-4")


def flash_supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashAttention-4 was verified for such heads here, bit for bit."""
    verified = dtype == torch.bfloat16 and head_dim in FLASH_HEAD_DIMS
    return verified and device.type == "cuda" and flash_version() is not None


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor | None = None,
    *,
    causal: bool,
    **varlen: Any,
) -> None:
    """Attend from each query to its keys, which the arguments `varlen` locate.

    The output is written to `out`, and the logs of the softmaxes' denominators to `log_sum` [H, T]
    fp32 if it is given.
    """
    # The public function does not write into a given tensor.
    from spmd_rl.kernels.runtime.cute_cache import flash_interface

    # Without a mask the package would take other key blocks for heads of 96, and always for 256.
    head_dim = q.shape[-1]
    is_named = not causal or head_dim > LARGE_HEAD
    tile = (TRAINING_ROWS, key_block(head_dim)) if is_named else None
    flash_interface()._flash_attn_fwd(
        q.detach(),
        k.detach(),
        v.detach(),
        causal=causal,
        num_splits=1,
        tile_mn=tile,
        out=out,
        lse=log_sum,
        **varlen,
    )


class SequenceBounds:
    """Where sequences that lie end to end begin; a call's padding is one more sequence."""

    def __init__(self, lengths: NDArray[np.int64], device: torch.device) -> None:
        ends = np.cumsum(lengths)
        self.num_tokens = int(ends[-1])
        self.longest = int(lengths.max())
        self.bounds = to_int32([0, *ends, padded_rows(self.num_tokens)], device)

    def arguments(self, num_rows: int) -> VarlenArguments:
        """Return the arguments for `num_rows` rows: the tokens, or these padded to the row tile."""
        padding = num_rows - self.num_tokens
        bounds, longest = self.bounds if padding else self.bounds[:-1], max(self.longest, padding)
        return {
            "cu_seqlens_q": bounds,
            "cu_seqlens_k": bounds,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }


class PackedFlash:
    """Causal attention within sequences laid end to end, differentiable.

    Shape: q [T', H, D], k and v [T', K, D], T' the number of tokens or that padded to the row tile.
    """

    def __init__(self, lengths: NDArray[np.int64], device: torch.device) -> None:
        self.bounds = SequenceBounds(lengths, device)
        self._in_windows = PackedWindows(lengths, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach = WHOLE) -> Tensor:
        if reach.window:
            return self._in_windows(q, k, v, reach.sinks, reach.window)
        return call(_PackedAttention, q, k, v, reach.sinks, self.bounds.arguments(len(q)))


class _PackedAttention(torch.autograd.Function):
    """The package's own function does not take a tile."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bounds: VarlenArguments
    ) -> Tensor:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        flash_forward(q, k, v, out, log_sum, causal=True, **bounds)
        if sinks is not None:
            out, with_sink = with_sinks(out, log_sum.t(), sinks)
            log_sum = with_sink.t().contiguous()
        ctx.save_for_backward(q, k, v, out, log_sum, sinks)
        ctx.arguments = bounds
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The package's weights are those beside sinks, by the sums that it is given."""
        *_, out, log_sum, sinks = ctx.saved_tensors
        of_sinks = None
        if sinks is not None:
            inner = (grads[0].float() * out.float()).sum(-1)
            of_sinks = gradient_of_sinks(sinks, log_sum.t(), inner)
        return *flash_gradients(ctx, grads[0]), of_sinks, None


def flash_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, of causal attention over all keys.

    `ctx` has saved these, the output and the log sums, and has the sequences as `arguments`.
    """
    from spmd_rl.kernels.runtime.cute_cache import flash_interface

    deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v, out, log_sum, *_ = ctx.saved_tensors
    found: tuple[Tensor, ...] = flash_interface()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad.contiguous(),
        log_sum,
        causal=True,
        deterministic=deterministic,
        **ctx.arguments,
    )
    return found


class PagedFlash:
    """Attention of each new token to its sequence's pages, up to itself.

    Shape: q [T', H, D], of which the first `num_tokens` rows count; the result is unset beyond
    them. Keys and values are [num_pages, page_size, K, D]. `pages` [B, P], `num_keys` [B] and
    `bounds` [B + 1] are int32 on the device: `bounds` says where each sequence's new tokens begin
    and end. No sequence has more than `longest` new tokens.
    """

    def __init__(
        self, pages: Tensor, num_keys: Tensor, bounds: Tensor, num_tokens: int, longest: int
    ) -> None:
        self.pages = pages
        self.num_keys = num_keys
        self.bounds = bounds
        self.num_tokens = num_tokens
        self.longest = longest

    @cached_property
    def _in_windows(self) -> PagedWindows:
        return PagedWindows(self.pages, self.num_keys, self.bounds, self.num_tokens)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, reach: Reach = WHOLE) -> Tensor:
        if reach.window:
            return self._in_windows(q, keys, values, reach.sinks, reach.window)
        out, log_sum = _outputs(q, self.num_tokens, reach)
        new = slice(self.num_tokens)
        flash_forward(
            q[new],
            keys,
            values,
            out[new],
            None if log_sum is None else log_sum.t(),
            causal=True,
            cu_seqlens_q=self.bounds,
            max_seqlen_q=self.longest,
            seqused_k=self.num_keys,
            page_table=self.pages,
        )
        return _beside_sinks(out, log_sum, reach)


class DecodeFlash:
    """Attention of one new token of each sequence to its pages, without a read on the host.

    Shape: as `PagedFlash`, with B for `num_tokens`; `tile_counter` and `exponents` as in
    `decode_attention`.
    """

    def __init__(
        self,
        pages: Tensor,
        num_keys: Tensor,
        tile_counter: Tensor,
        exponents: KvExponents | None = None,
    ) -> None:
        self.pages = pages
        self.num_keys = num_keys
        self.tile_counter = tile_counter
        self.exponents = exponents

    @cached_property
    def _in_windows(self) -> PagedWindows:
        batch = len(self.num_keys)
        bounds = torch.arange(batch + 1, device=self.num_keys.device)
        return PagedWindows(self.pages, self.num_keys, bounds, batch)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, reach: Reach = WHOLE) -> Tensor:
        if reach.window:
            return self._in_windows(q, keys, values, reach.sinks, reach.window)
        out, log_sum = _outputs(q, len(self.num_keys), reach)
        new = slice(len(self.num_keys))
        decode_attention(
            q[new],
            keys,
            values,
            self.pages,
            self.num_keys,
            self.tile_counter,
            out[new],
            log_sum,
            self.exponents,
        )
        return _beside_sinks(out, log_sum, reach)


def _outputs(q: Tensor, num_tokens: int, reach: Reach) -> tuple[Tensor, Tensor | None]:
    """Return memory for what queries get and, for sinks, for their log sums [T, H]."""
    log_sum = None
    if reach.sinks is not None:
        log_sum = q.new_empty(q.shape[1], num_tokens, dtype=torch.float32).t()
    return q.new_empty(q.shape), log_sum


def _beside_sinks(out: Tensor, log_sum: Tensor | None, reach: Reach) -> Tensor:
    if log_sum is not None and reach.sinks is not None:
        new = out[: len(log_sum)]
        new.copy_(with_sinks(new, log_sum, reach.sinks)[0])
    return out


def flash_of_chunks(
    page_table: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    page_size: int,
    tile_counter: Tensor,
    device: torch.device,
) -> PagedFlash | DecodeFlash:
    """Return the kernel for `lengths` new tokens after `starts` old ones.

    Entries of a page table past the end of its sequence may hold anything.
    """
    pages = to_int32(pages_in_use(page_table, starts + lengths, page_size), device)
    num_keys = to_int32(starts + lengths, device)
    if lengths.max() == 1:
        return DecodeFlash(pages, num_keys, tile_counter)
    bounds = to_int32([0, *np.cumsum(lengths)], device)
    return PagedFlash(pages, num_keys, bounds, int(lengths.sum()), int(lengths.max()))


def pages_in_use(
    page_table: NDArray[np.int64], ends: NDArray[np.int64], page_size: int
) -> NDArray[np.int64]:
    """Return `page_table` with a sequence's first page in place of all beyond its end."""
    used = -(-ends // page_size)
    return np.where(np.arange(page_table.shape[1]) < used[:, None], page_table, page_table[:, :1])


def to_int32(values: NDArray[np.int64] | list[int], device: torch.device) -> Tensor:
    return upload(np.asarray(values, dtype=np.int32), device)
