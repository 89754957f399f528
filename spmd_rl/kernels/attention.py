"""Causal attention in which a query's bits depend on its own history alone.

On NVIDIA GPUs that is FlashAttention-4 (flash.py). On the CPU one function, `blocked_attention`, serves training
(packed_attention.py) and decoding (paged_attention.py): the exact maximum over the visible keys, then exp(s - m), then
sums of weighted values over blocks of 64 keys, and of weights over tiles of 16, counted from the start of the sequence,
in ascending order. A key beyond a query's sight adds an exact zero, so padding and neighbours change nothing, and keys
that no query of a call sees are left out. Queries are laid in rows of a fixed tile height, several query heads of one
key-value head together.

Where neither applies, the same interface runs torch's scaled-dot-product attention.

Shape letters: B sequences, L query positions, S keys (a multiple of 16), H heads, K key-value heads, G = H / K,
D head size, R rows = L * G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.differentiable import call
from spmd_rl.kernels.tile import padded_rows

KV_BLOCK = 64
KEY_TILE = 16
QUERY_TILE = 8
MAX_SCORES = 1 << 24


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, num_rows: int) -> Tensor:
    """Softmax(q k^T) v with a fixed order of sums; differentiable in q, k and v.

    Shape: q [K, B, R, D] with R a multiple of the query tile, k and v [K, B, S, D], visible [B, R] int64: how many keys
    (from the first) each row sees, at least 1. Rows from `num_rows` on are padding. Returns [K, B, R, D], unset there.
    """
    return call(_BlockedAttention, q, k, v, visible, scale, num_rows)


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [K, B, R, D], k [K, B, W, D], visible [B, r], r <= R -> [K, B, r, W], unseen keys at minus infinity.

    The product is taken at the full height R, so that its bits are the contract's; what follows is row by row.
    """
    num_groups, batch, rows, dim = q.shape
    keys, live = k.shape[2], visible.shape[1]
    product = torch.bmm(q.reshape(-1, rows, dim), k.reshape(-1, keys, dim).transpose(1, 2))
    scores = product.view(num_groups, batch, rows, keys)[:, :, :live].contiguous().mul_(scale)
    unseen = torch.arange(keys, device=q.device) >= visible.unsqueeze(-1)
    return scores.masked_fill_(unseen, -torch.inf)


class _BlockedAttention(torch.autograd.Function):
    """Forward in the contract's order; backward recomputes the weights with plain matrix products, unless they take no
    more room than the queries."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, num_rows: int) -> Tensor:
        out = torch.empty_like(q)
        log_norm = q.new_empty(q.shape[:3])
        width, kept = _width(visible), None
        for rows in _row_slices(q, k):
            live = slice(rows.start, min(rows.stop, num_rows))
            scores = _scores(q[:, :, rows], k[:, :, :width], visible[:, live], scale)
            maximum = scores.amax(-1, keepdim=True)
            weights = scores.sub_(maximum).exp_()
            values, norm = _ascending_sums(weights, v[:, :, :width], rows.stop - rows.start)
            out[:, :, live] = values.div_(norm)
            if ctx.needs_input_grad[0] and live.stop - live.start == num_rows and weights.numel() <= q.numel():
                kept = weights / norm
            log_norm[:, :, live] = (norm.log_() + maximum).squeeze(-1)
        ctx.save_for_backward(q, k, v, visible, out, log_norm, kept)
        ctx.scale, ctx.num_rows = scale, num_rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, visible, out, log_norm, kept = ctx.saved_tensors
        grad, width = grads[0], _width(visible)
        grad_q, sums = torch.empty_like(q), []
        grad_q[:, :, ctx.num_rows :] = 0
        keys, values = k[:, :, :width], v[:, :, :width]
        for rows in _row_slices(q, k):
            live = slice(rows.start, min(rows.stop, ctx.num_rows))
            weights = kept
            if weights is None:
                weights = _scores(q[:, :, live], keys, visible[:, live], ctx.scale)
                weights.sub_(log_norm[:, :, live].unsqueeze(-1)).exp_()
            grad_rows = grad[:, :, live]
            grad_v = weights.transpose(2, 3) @ grad_rows
            grad_scores = grad_rows @ values.transpose(2, 3)
            grad_scores -= (grad_rows * out[:, :, live]).sum(-1, keepdim=True)
            grad_scores *= weights * ctx.scale
            grad_q[:, :, live] = grad_scores @ keys
            sums.append((grad_scores.transpose(2, 3) @ q[:, :, live], grad_v))
        grad_k, grad_v = (reduce(Tensor.add_, parts) for parts in zip(*sums, strict=True))
        if width < k.shape[2]:
            grad_k, grad_v = (F.pad(one, (0, 0, 0, k.shape[2] - width)) for one in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None, None


def _width(visible: Tensor) -> int:
    """Keys that any row sees, up to the row tile: beyond them all weights are exact zeros."""
    return padded_rows(int(visible.max()))


def _ascending_sums(weights: Tensor, v: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Sum of weighted values [K, B, r, D] and of weights [K, B, r, 1], one block or tile of keys after the other.

    The products are taken at the given height of rows, r or more.
    """
    num_groups, batch, rows, keys = weights.shape
    flat, values = weights.view(-1, rows, keys), v.reshape(-1, keys, v.shape[-1])
    tall = F.pad(flat, (0, 0, 0, height - rows)) if height > rows else flat
    norm = weights.unflatten(-1, (-1, KEY_TILE)).sum(-1).cumsum(-1)[..., -1:]
    total = torch.bmm(tall[:, :, :KV_BLOCK], values[:, :KV_BLOCK])
    for start in range(KV_BLOCK, keys, KV_BLOCK):
        block = slice(start, start + KV_BLOCK)
        total += torch.bmm(tall[:, :, block], values[:, block])
    return total.view(num_groups, batch, height, -1)[:, :, :rows], norm


def _row_slices(q: Tensor, k: Tensor) -> list[slice]:
    """Row ranges, multiples of the tile, whose score matrix stays within MAX_SCORES entries."""
    num_groups, batch, rows, _ = q.shape
    height = max(1, MAX_SCORES // (num_groups * batch * k.shape[2] * QUERY_TILE)) * QUERY_TILE
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]


@dataclass(frozen=True)
class RowLayout:
    """Where the flat tokens of a call go in [B, L] query positions, and back.

    `gather` [B * L] is the token at each query position (0 where padded), `scatter` [T'] the query position of each
    token, T' = T padded to the row tile; `visible` [B, L * G] how many keys a row sees. Rows from `num_used` on are
    padding in every sequence.
    """

    batch: int
    num_used: int
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
        """`first` [B]: where each sequence's new tokens begin; `starts` [B]: keys that exist before them; `lengths`
        [B]: new tokens."""
        unit = QUERY_TILE // math.gcd(QUERY_TILE, queries_per_key)
        batch, positions = len(lengths), -(-int(lengths.max()) // unit) * unit
        offset = np.arange(positions)
        valid = offset < lengths[:, None]
        gather = np.where(valid, first[:, None] + offset, 0)
        visible = np.where(valid, starts[:, None] + offset + 1, 1)
        scatter = _padded(np.flatnonzero(valid))

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        num_used, seen = int(lengths.max()) * queries_per_key, visible.repeat(queries_per_key, axis=1)
        return RowLayout(batch, num_used, tensor(gather.reshape(-1)), tensor(scatter), tensor(seen))

    def rows(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """q [T, H, D] -> [K, B, L * G, D]."""
        laid = lay_rows(q.reshape(len(q), num_kv_heads, -1), self.gather)
        return laid.view(num_kv_heads, self.batch, -1, q.shape[-1])

    def tokens(self, out: Tensor) -> Tensor:
        """[K, B, L * G, D] -> [T', H, D]."""
        num_kv_heads, size = len(out), len(self.gather)
        heads = _of_each_head(self.scatter, num_kv_heads, size).t().reshape(-1)
        return out.reshape(num_kv_heads * size, -1).index_select(0, heads).view(len(self.scatter), -1, out.shape[-1])


def lay_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, K, D] -> [K, R, D], the rows of each head; what is copied, and added in the gradient, is contiguous."""
    num_tokens, num_heads, dim = x.shape
    heads = x.transpose(0, 1).reshape(num_heads * num_tokens, dim)
    laid = heads.index_select(0, _of_each_head(rows, num_heads, num_tokens).view(-1))
    return laid.view(num_heads, len(rows), dim)


def _of_each_head(rows: Tensor, num_heads: int, num_rows: int) -> Tensor:
    """[R] -> [K, R]: where `rows` lie in [K * num_rows]."""
    return rows + torch.arange(0, num_heads * num_rows, num_rows, device=rows.device).unsqueeze(1)


def token_order(lengths: NDArray[np.int64], parts: NDArray[np.int64], device: torch.device) -> Tensor:
    """[T']: where each token's output lies, the parts' outputs one after the other, each padded to the row tile."""
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
        return blocked_attention(q, k, v, layout.visible, scale, layout.num_used)
    return sdpa(q, k, v, layout.visible, scale)


def sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The fallback away from the CPU: same arguments as `blocked_attention`, no promise about bits."""
    seen = torch.arange(k.shape[2], device=q.device) < visible.unsqueeze(-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
