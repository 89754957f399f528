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

import math
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import pad_columns, padded_rows

KV_BLOCK = 64
QUERY_TILE = 8
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


@dataclass(frozen=True)
class RowLayout:
    """Where the flat tokens of a call go in [B, L] query positions, and back.

    `gather` [B * L] is the token at each query position (0 where padded), `scatter` [T'] the query
    position of each token, T' = T padded to the row tile; `visible` [B, L * G] how many keys a row
    sees (from the first), at least 1. Rows from `num_used` on are padding in every sequence, and
    keys from `num_keys` on are seen by no row. `is_causal`: no sequence has keys before its tokens,
    so that the nth of them, with a row for each of `groups` heads, sees n keys.
    """

    batch: int
    groups: int
    num_used: int
    num_keys: int
    is_causal: bool
    gather: Tensor
    scatter: Tensor
    visible: Tensor

    @staticmethod
    def build(
        first: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        queries_per_key: int,
        device: torch.device,
    ) -> RowLayout:
        """`first` [B]: where each sequence's new tokens begin; `starts` [B]: keys that exist before
        them; `lengths` [B]: new tokens."""
        unit = QUERY_TILE // math.gcd(QUERY_TILE, queries_per_key)
        batch, positions = len(lengths), -(-int(lengths.max()) // unit) * unit
        offset = np.arange(positions)
        valid = offset < lengths[:, None]
        gather = np.where(valid, first[:, None] + offset, 0)
        visible = np.where(valid, starts[:, None] + offset + 1, 1)
        scatter = _padded(np.flatnonzero(valid))

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        num_used, num_keys = int(lengths.max()) * queries_per_key, padded_rows(int(visible.max()))
        seen = tensor(visible.repeat(queries_per_key, axis=1))
        sizes = batch, queries_per_key, num_used, num_keys, not starts.any()
        return RowLayout(*sizes, tensor(gather.reshape(-1)), tensor(scatter), seen)

    def unseen(self, rows: slice) -> Tensor:
        """[B, r, W]: minus infinity where one of these rows does not see a key, else 0; all rows'
        serve every layer.
        """
        return self._unseen if rows == slice(0, self.num_used) else self._hidden_from(rows)

    @cached_property
    def _unseen(self) -> Tensor:
        return self._hidden_from(slice(0, self.num_used))

    def _hidden_from(self, rows: slice) -> Tensor:
        hidden = torch.arange(self.num_keys, device=self.visible.device) >= self.visible[
            :, rows
        ].unsqueeze(-1)
        return torch.where(hidden, -torch.inf, 0.0)

    def rows(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """q [T, H, D] -> [K, B, L * G, D]."""
        laid = lay_rows(q.reshape(len(q), num_kv_heads, -1), self.gather)
        return laid.view(num_kv_heads, self.batch, -1, q.shape[-1])

    def tokens(self, out: Tensor) -> Tensor:
        """[K, B, L * G, D] -> [T', H, D]."""
        num_kv_heads, size = len(out), len(self.gather)
        heads = _of_each_head(self.scatter, num_kv_heads, size).t().reshape(-1)
        return (
            out.reshape(num_kv_heads * size, -1)
            .index_select(0, heads)
            .view(len(self.scatter), -1, out.shape[-1])
        )


def doublings(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often a tile of rows is doubled to hold so many: what is laid out together has one
    number.
    """
    numbers: NDArray[np.int64] = np.ceil(np.log2(np.maximum(counts / QUERY_TILE, 1))).astype(
        np.int64
    )
    return numbers


def lay_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, K, D] -> [K, R, D], the rows of each head; what is copied, and added in the gradient,
    is contiguous.
    """
    num_tokens, num_heads, dim = x.shape
    heads = x.transpose(0, 1).reshape(num_heads * num_tokens, dim)
    laid = heads.index_select(0, _of_each_head(rows, num_heads, num_tokens).view(-1))
    return laid.view(num_heads, len(rows), dim)


def _of_each_head(rows: Tensor, num_heads: int, num_rows: int) -> Tensor:
    """[R] -> [K, R]: where `rows` lie in [K * num_rows]."""
    return rows + torch.arange(0, num_heads * num_rows, num_rows, device=rows.device).unsqueeze(1)


def token_order(
    lengths: NDArray[np.int64], parts: NDArray[np.int64], device: torch.device
) -> Tensor:
    """[T']: where each token's output lies, the parts' outputs one after the other, each padded to
    the row tile.
    """
    part = np.repeat(parts, lengths)
    place, size = np.empty(len(part), dtype=np.int64), 0
    for number in np.unique(parts):
        own = part == number
        count = int(own.sum())
        place[own] = size + np.arange(count)
        size += padded_rows(count)
    return torch.from_numpy(_padded(place)).to(device)


def _padded(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Zeros appended up to the row tile."""
    return np.pad(indices, (0, padded_rows(len(indices)) - len(indices)))


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
