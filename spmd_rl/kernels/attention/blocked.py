"""Causal attention in which a query's bits depend on its own history alone.

On NVIDIA GPUs that is FlashAttention-4 (flash.py). On the CPU one function, `blocked_attention`,
serves training (packed_attention.py) and decoding (paged_attention.py): torch's softmax over keys
in multiples of 16, then sums of weighted values over blocks of 64 keys, counted from the start of
the sequence, in ascending order. A key beyond a query's sight adds an exact zero, so padding and
neighbours change nothing, and keys that no query of a call sees are left out. Queries are laid in
rows of a fixed tile height, several query heads of one key-value head together.

On a GPU where FlashAttention-4 does not run, a kernel of ours (attention_triton.py) takes the same
rows.

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
MAX_SCORES = 1 << 24
# cuDNN plans for each shape
PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float) -> Tensor:
    """Softmax(q k^T) v with a fixed order of sums; differentiable in q, k and v.

    Shape: q [K, B, R, D] with R a multiple of the query tile, k and v [K, B, S, D]; returns [K, B,
    R, D], unset in the layout's padding.
    """
    dim = q.shape[-1]
    out: Tensor = call(_BlockedAttention, *map(pad_columns, (q, k, v)), layout, scale)
    return out if out.shape[-1] == dim else out[..., :dim]


def _weights(q: Tensor, k: Tensor, unseen: Tensor, scale: float) -> Tensor:
    """q [K, B, R, D], k [K, B, W, D], unseen [B, r, W], r <= R -> what each row gives each key, [K,
    B, r, W].

    The product is taken at the full height R, so that its bits are the contract's; what follows is
    row by row.
    """
    num_groups, batch, rows, dim = q.shape
    keys, live = k.shape[2], unseen.shape[1]
    product = torch.bmm(q.reshape(-1, rows, dim), k.reshape(-1, keys, dim).transpose(1, 2))
    return (
        torch.add(unseen, product.view(num_groups, batch, rows, keys)[:, :, :live], alpha=scale)
        .softmax(-1)
        .to(q.dtype)
    )


class _BlockedAttention(torch.autograd.Function):
    """Forward in the contract's order; backward recomputes the weights, unless they take no more
    room than the queries."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
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
            grad_k, grad_v = (F.pad(one, (0, 0, 0, k.shape[2] - width)) for one in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None


def _ascending_sums(weights: Tensor, v: Tensor, height: int) -> Tensor:
    """Sum of weighted values [K, B, r, D], one block of keys after the other.

    The products are taken at the given height of rows, r or more.
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
    """Row ranges, multiples of the tile, whose score matrix stays within MAX_SCORES entries; each
    has a used row.
    """
    num_groups, batch, rows, _ = q.shape
    height = max(1, MAX_SCORES // (num_groups * batch * k.shape[2] * QUERY_TILE)) * QUERY_TILE
    return [slice(start, min(start + height, rows)) for start in range(0, num_used, height)]


def attention_of_rows(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """The op for the device at hand. Shape: as `blocked_attention`."""
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        return blocked_attention(q, k, v, layout, scale)
    out: Tensor = call(_BlocksOnGpu, q, k, v, layout, scale)
    return out


class _BlocksOnGpu(torch.autograd.Function):
    """Triton's forward in the contract's order, the gradient of torch's scaled-dot-product
    attention.
    """

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
    """What torch's scaled-dot-product attention gives q, k and v for the rows' gradient, which
    padding has none of.

    Shape: as `blocked_attention`. A mask is only made where sequences go on from keys that were
    there before.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad(), sdpa_kernel(PLANLESS):
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
