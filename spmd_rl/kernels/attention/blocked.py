"""Blocked causal attention, in which a query's bits depend on its own history alone.

On the CPU `blocked_attention` serves training and decoding. It takes torch's softmax over keys in
multiples of 16. Then it adds weighted values in blocks of 64 keys, counted from the start of the
sequence, in ascending order. A key that a query does not see adds an exact zero, so padding and
neighbours change nothing. Keys that no query of a call sees are left out, before a window in whole
blocks. A sink takes its share of a row's weights after the softmax, and its exponential is taken
like those of keys, from their maximum. Queries lie in rows of a fixed tile height, several query
heads of one key-value head together (row_layout.py). bfloat16 is computed in float32 and rounded
once: on CPUs with AMX, the sums in a product of bfloat16 depend on the sizes of the call.

On GPUs where FlashAttention-4 does not run, our Triton kernel takes the same rows
(blocked_triton.py).

Shape letters: B sequences, L query positions, S keys (a multiple of 16), H heads, K key-value
heads, G = H / K, D head size, R rows = L * G.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.row_layout import KV_BLOCK as KV_BLOCK
from spmd_rl.kernels.attention.row_layout import QUERY_TILE, RowLayout
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import pad_columns

MAX_SCORES = 1 << 24  # entries of a score matrix at a time
# without cuDNN, which would make a plan for each shape
GRADIENT_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float, reach: Reach = WHOLE
) -> Tensor:
    """Compute softmax(q k^T) v with a fixed order of sums; differentiable in q, k, v and sinks.

    Shape: q [K, B, R, D] with R a multiple of the query tile, k [K, B, S, D] and v [K, B, S, V];
    returns [K, B, R, V], unset in the layout's padding.
    """
    dim, wide = v.shape[-1], torch.promote_types(q.dtype, torch.float32)
    padded = (pad_columns(x.to(wide)) for x in (q, k, v))
    sinks = None if reach.sinks is None else reach.sinks.to(wide)
    out = call(_BlockedAttention, *padded, sinks, layout, scale, reach.window).to(q.dtype)
    return out if out.shape[-1] == dim else out[..., :dim]


def _weights(
    q: Tensor, k: Tensor, unseen: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the attention weights of each row, and the share of all keys beside a sink.

    The product is taken at the full height R, so that it has the contract's bits. All else is row
    by row.
    Shape: q [K, B, R, D], k [K, B, W, D], unseen [B, r, W] with r <= R, sinks [K, 1, r, 1]; returns
    [K, B, r, W] and [K, B, r, 1].
    """
    product = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores = product.unflatten(0, q.shape[:2])[:, :, : unseen.shape[1]]
    scores = torch.add(unseen, scores, alpha=scale)
    weights = scores.softmax(-1).to(q.dtype)
    if sinks is None:
        return weights, None
    share = _share(scores, weights, sinks)
    return weights * share, share


def _share(scores: Tensor, weights: Tensor, sinks: Tensor) -> Tensor:
    """Return what is left to the keys of a row beside its sink.

    The largest weight is one over the sum of exponentials of all keys.
    """
    beside = (sinks - scores.amax(-1, keepdim=True)).exp_() * weights.amax(-1, keepdim=True)
    return beside.add_(1.0).reciprocal_()


_Range = tuple[slice, Tensor]  # of keys, and their gradients


class _BlockedAttention(torch.autograd.Function):
    """Forward in the contract's order.

    Backward recomputes the weights, unless they take no more memory than the queries.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: RowLayout,
        scale: float,
        window: int,
    ) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        num_rows, kept, share = layout.num_used, None, None
        for rows in _row_slices(q, k, num_rows):
            live = slice(rows.start, min(rows.stop, num_rows))
            keys = slice(layout.first_key(live, window), layout.num_keys)
            unseen = layout.unseen(live, window)
            of_rows = _of_rows(sinks, live, len(k))
            weights, share = _weights(q[:, :, rows], k[:, :, keys], unseen, scale, of_rows)
            out[:, :, live] = _ascending_sums(weights, v[:, :, keys], rows.stop - rows.start)
            if (
                ctx.needs_input_grad[0]
                and live.stop - live.start == num_rows
                and weights.numel() <= q.numel()
            ):
                kept = weights
        ctx.save_for_backward(q, k, v, sinks, kept, None if kept is None else share)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, kept, share = ctx.saved_tensors
        layout, window = ctx.layout, ctx.window
        grad, num_rows = grads[0], layout.num_used
        grad_q, of_keys, of_values = torch.empty_like(q), list[_Range](), list[_Range]()
        grad_q[:, :, num_rows:] = 0
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        for rows in _row_slices(q, k, num_rows):
            live = slice(rows.start, min(rows.stop, num_rows))
            seen = slice(layout.first_key(live, window), layout.num_keys)
            keys, values, weights = k[:, :, seen], v[:, :, seen], kept
            if weights is None:
                unseen = layout.unseen(live, window)
                of_rows = _of_rows(sinks, live, len(k))
                weights, share = _weights(q[:, :, rows], keys, unseen, ctx.scale, of_rows)
            grad_rows = grad[:, :, live]
            of_values.append((seen, weights.transpose(2, 3) @ grad_rows))
            grad_weights = grad_rows @ values.transpose(2, 3)
            if grad_sinks is not None:
                lost = (share - 1.0) * (weights * grad_weights).sum(-1, keepdim=True)
                _add_of_rows(grad_sinks, live, lost.sum(1))
            grad_scores = torch._softmax_backward_data(
                grad_weights, weights, -1, weights.dtype
            ).mul_(ctx.scale)
            grad_q[:, :, live] = grad_scores @ keys
            of_keys.append((seen, grad_scores.transpose(2, 3) @ q[:, :, live]))
        return grad_q, _sum(of_keys, k), _sum(of_values, v), grad_sinks, None, None, None


def _sum(parts: list[_Range], like: Tensor) -> Tensor:
    """Add gradients of ranges of keys; those of keys in none are zero. Shape: that of `like`."""
    (first, total), *others = parts
    num_keys = like.shape[2]
    if total.shape[2] < num_keys:
        total = F.pad(total, (0, 0, first.start, num_keys - first.stop))
    for seen, part in others:
        total[:, :, seen] += part
    return total


def _of_rows(sinks: Tensor | None, rows: slice, num_groups: int) -> Tensor | None:
    """Return the sink of each row. Shape: [H] to [K, 1, r, 1]."""
    if sinks is None:
        return None
    groups = len(sinks) // num_groups
    heads = torch.arange(rows.start, rows.stop) % groups
    return sinks.view(num_groups, groups)[:, heads].view(num_groups, 1, -1, 1)


def _add_of_rows(total: Tensor, rows: slice, part: Tensor) -> None:
    """Add to the sinks' gradient what each row takes of it. Shape: [H] and [K, r, 1]."""
    groups = len(total) // len(part)
    heads = torch.arange(rows.start, rows.stop) % groups
    total.view(len(part), groups).index_add_(1, heads, part.squeeze(-1))


def _ascending_sums(weights: Tensor, v: Tensor, height: int) -> Tensor:
    """Sum weighted values, one block of keys after the other. Shape: returns [K, B, r, D].

    The products are taken at a height of `height` rows, r or more.
    """
    num_groups, batch, rows, keys = weights.shape
    flat, values = weights.view(-1, rows, keys), v.reshape(-1, keys, v.shape[-1])
    tall = F.pad(flat, (0, 0, 0, height - rows)) if height > rows else flat
    total = torch.bmm(tall[:, :, :KV_BLOCK], values[:, :KV_BLOCK])
    for start in range(KV_BLOCK, keys, KV_BLOCK):
        block = slice(start, start + KV_BLOCK)
        total += torch.bmm(tall[:, :, block], values[:, block])
    return total.view(num_groups, batch, height, -1)[:, :, :rows]


def _row_slices(q: Tensor, k: Tensor, num_used: int) -> list[slice]:
    """Cut rows into slices whose score matrix has at most MAX_SCORES entries.

    Slices are multiples of the tile, and each has a used row.
    """
    num_groups, batch, rows, _ = q.shape
    height = max(1, MAX_SCORES // (num_groups * batch * k.shape[2] * QUERY_TILE)) * QUERY_TILE
    return [slice(start, min(start + height, rows)) for start in range(0, num_used, height)]


def attention_of_rows(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, reach: Reach) -> Tensor:
    """Attend with the device's kernel. Shape: as `blocked_attention`."""
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        return blocked_attention(q, k, v, layout, scale, reach)
    if not reach.is_whole:
        raise ConfigError("windows and sinks need FlashAttention-4 and bfloat16 on a Hopper GPU")
    out: Tensor = call(_BlocksOnGpu, q, k, v, layout, scale)
    return out


class _BlocksOnGpu(torch.autograd.Function):
    """Triton's forward in the contract's order, and torch's gradient of its own attention."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float
    ) -> Tensor:
        from spmd_rl.kernels.attention.blocked_triton import attend_in_blocks

        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.scale = layout, scale
        return attend_in_blocks(q, k, v, layout.visible, layout.num_used, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        return *library_gradients(q, k, v, ctx.layout, ctx.scale, grads[0]), None, None


def library_gradients(
    q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of torch's scaled-dot-product attention for q, k and v.

    Padding has no gradient. A mask is made only where sequences have keys before their tokens.
    Shape: as `blocked_attention`.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad(), sdpa_kernel(GRADIENT_BACKENDS):
        query, key, value = leaves
        if layout.is_causal:
            length = layout.num_used // layout.groups
            heads = (
                query.unflatten(2, (-1, layout.groups))[:, :, :length]
                .permute(1, 0, 3, 2, 4)
                .flatten(1, 2)
            )
            key, value = (
                x[:, :, :length].transpose(0, 1).repeat_interleave(layout.groups, 1)
                for x in (key, value)
            )
            out = F.scaled_dot_product_attention(heads, key, value, is_causal=True, scale=scale)
            grad = (
                grad.unflatten(2, (-1, layout.groups))[:, :, :length]
                .permute(1, 0, 3, 2, 4)
                .flatten(1, 2)
            )
        else:
            seen = torch.arange(k.shape[2], device=k.device) < layout.visible.unsqueeze(-1)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
        grad_q, grad_k, grad_v = torch.autograd.grad(out, leaves, grad)
    return grad_q, grad_k, grad_v
