"""Blocked causal attention, in which a query's bits depend on its own history alone.

On the CPU `blocked_attention` serves training and decoding. It takes torch's softmax over keys in
multiples of 16. Then it adds weighted values in blocks of 64 keys, counted from the start of the
sequence, in ascending order. A key that a query does not see adds an exact zero, so padding and
neighbours change nothing. Keys that no query of a call sees are left out. Queries lie in rows of a
fixed tile height, several query heads of one key-value head together (row_layout.py). bfloat16 is
computed in float32 and rounded once: on CPUs with AMX, the sums in a product of bfloat16 depend on
the sizes of the call.

On GPUs where FlashAttention-4 does not run, our Triton kernel takes the same rows
(blocked_triton.py).

Shape letters: B sequences, L query positions, S keys (a multiple of 16), H heads, K key-value
heads, G = H / K, D head size, R rows = L * G.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmd_rl.kernels.attention.row_layout import QUERY_TILE, RowLayout
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import pad_columns

KV_BLOCK = 64
MAX_SCORES = 1 << 24  # entries of a score matrix at a time
# without cuDNN, which would make a plan for each shape
GRADIENT_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float) -> Tensor:
    """Compute softmax(q k^T) v with a fixed order of sums; differentiable in q, k and v.

    Shape: q [K, B, R, D] with R a multiple of the query tile, k [K, B, S, D] and v [K, B, S, V];
    returns [K, B, R, V], unset in the layout's padding.
    """
    dim, wide = v.shape[-1], torch.promote_types(q.dtype, torch.float32)
    padded = (pad_columns(x.to(wide)) for x in (q, k, v))
    out = call(_BlockedAttention, *padded, layout, scale).to(q.dtype)
    return out if out.shape[-1] == dim else out[..., :dim]


def _weights(q: Tensor, k: Tensor, unseen: Tensor, scale: float) -> Tensor:
    """Return the attention weights of each row.

    The product is taken at the full height R, so that it has the contract's bits. All else is row
    by row.
    Shape: q [K, B, R, D], k [K, B, W, D], unseen [B, r, W] with r <= R; returns [K, B, r, W].
    """
    num_groups, batch, rows, dim = q.shape
    keys, live = k.shape[2], unseen.shape[1]
    product = torch.bmm(q.reshape(-1, rows, dim), k.reshape(-1, keys, dim).transpose(1, 2))
    scores = product.view(num_groups, batch, rows, keys)[:, :, :live]
    return torch.add(unseen, scores, alpha=scale).softmax(-1).to(q.dtype)


class _BlockedAttention(torch.autograd.Function):
    """Forward in the contract's order.

    Backward recomputes the weights, unless they take no more memory than the queries.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float
    ) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        num_rows, width, kept = layout.num_used, layout.num_keys, None
        for rows in _row_slices(q, k, num_rows):
            live = slice(rows.start, min(rows.stop, num_rows))
            weights = _weights(q[:, :, rows], k[:, :, :width], layout.unseen(live), scale)
            out[:, :, live] = _ascending_sums(weights, v[:, :, :width], rows.stop - rows.start)
            if (
                ctx.needs_input_grad[0]
                and live.stop - live.start == num_rows
                and weights.numel() <= q.numel()
            ):
                kept = weights
        ctx.save_for_backward(q, k, v, kept)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, kept = ctx.saved_tensors
        grad, num_rows, width = grads[0], ctx.layout.num_used, ctx.layout.num_keys
        grad_q, sums = torch.empty_like(q), []
        grad_q[:, :, num_rows:] = 0
        keys, values = k[:, :, :width], v[:, :, :width]
        for rows in _row_slices(q, k, num_rows):
            live = slice(rows.start, min(rows.stop, num_rows))
            weights = kept
            if weights is None:
                weights = _weights(q[:, :, rows], keys, ctx.layout.unseen(live), ctx.scale)
            grad_rows = grad[:, :, live]
            grad_v = weights.transpose(2, 3) @ grad_rows
            grad_weights = grad_rows @ values.transpose(2, 3)
            grad_scores = torch._softmax_backward_data(
                grad_weights, weights, -1, weights.dtype
            ).mul_(ctx.scale)
            grad_q[:, :, live] = grad_scores @ keys
            sums.append((grad_scores.transpose(2, 3) @ q[:, :, live], grad_v))
        grad_k, grad_v = (reduce(Tensor.add_, parts) for parts in zip(*sums, strict=True))
        if width < k.shape[2]:
            grad_k, grad_v = (
                F.pad(grad, (0, 0, 0, k.shape[2] - width)) for grad in (grad_k, grad_v)
            )
        return grad_q, grad_k, grad_v, None, None


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


def attention_of_rows(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """Attend with the device's kernel. Shape: as `blocked_attention`."""
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        return blocked_attention(q, k, v, layout, scale)
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
