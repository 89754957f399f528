"""Causal attention in which a query's bits depend on its own history alone.

One function, `blocked_attention`, serves training and decoding on the CPU: the exact maximum over the visible keys,
then exp(s - m), then sums of weights and of weighted values over blocks of 64 keys counted from the start of the
sequence, in ascending order. A block beyond a query's sight adds exact zeros, so padding and neighbours change
nothing. Queries are laid in rows of a fixed tile height, several query heads of one key-value head together.

On other devices the same interface runs torch's scaled-dot-product attention.

Shape letters: B sequences, L query positions, S keys (a multiple of 64), H heads, K key-value heads, G = H / K,
D head size, R rows = L * G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.tile import ROW_TILE, padded_rows

KV_BLOCK = 64
MAX_SCORES = 1 << 24


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax(q k^T) v with a fixed order of sums; differentiable in q, k and v.

    Shape: q [K, B, R, D] with R a multiple of the row tile, k and v [K, B, S, D], visible [B, R] int64: how many keys
    (from the first) each row sees, at least 1. Returns [K, B, R, D].
    """
    return _BlockedAttention.apply(q, k, v, visible, scale)


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [K, B, r, D], k [K, B, S, D], visible [B, r] -> [K, B, r, S], unseen keys at minus infinity."""
    num_groups, batch, rows, dim = q.shape
    keys = k.shape[2]
    scores = torch.bmm(q.reshape(-1, rows, dim), k.view(-1, keys, dim).transpose(1, 2)).view(
        num_groups, batch, rows, keys
    )
    scores *= scale
    unseen = torch.arange(keys, device=q.device) >= visible.unsqueeze(-1)
    return scores.masked_fill_(unseen, -torch.inf)


class _BlockedAttention(torch.autograd.Function):
    """Forward in the contract's order; backward recomputes the weights with plain matrix products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(q)
        log_norm = q.new_empty(q.shape[:3])
        for rows in _row_slices(q, k):
            scores = _scores(q[:, :, rows], k, visible[:, rows], scale)
            maximum = scores.amax(-1, keepdim=True)
            weights = scores.sub_(maximum).exp_()
            values, norm = _ascending_sums(weights, v)
            out[:, :, rows] = values.div_(norm)
            log_norm[:, :, rows] = (norm.log_() + maximum).squeeze(-1)
        ctx.save_for_backward(q, k, v, visible, out, log_norm)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, visible, out, log_norm = ctx.saved_tensors
        grad = grads[0]
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in _row_slices(q, k):
            weights = _scores(q[:, :, rows], k, visible[:, rows], ctx.scale)
            weights.sub_(log_norm[:, :, rows].unsqueeze(-1)).exp_()
            grad_rows = grad[:, :, rows]
            grad_v += weights.transpose(2, 3) @ grad_rows
            grad_scores = grad_rows @ v.transpose(2, 3)
            grad_scores -= (grad_rows * out[:, :, rows]).sum(-1, keepdim=True)
            grad_scores *= weights.mul_(ctx.scale)
            grad_q[:, :, rows] = grad_scores @ k
            grad_k += grad_scores.transpose(2, 3) @ q[:, :, rows]
        return grad_q, grad_k, grad_v, None, None


def _ascending_sums(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of weighted values [K, B, r, D] and of weights [K, B, r, 1], block after block of keys."""
    num_groups, batch, rows, keys = weights.shape
    flat, values = weights.view(-1, rows, keys), v.view(-1, keys, v.shape[-1])
    total = torch.bmm(flat[:, :, :KV_BLOCK], values[:, :KV_BLOCK])
    norm = flat[:, :, :KV_BLOCK].sum(-1, keepdim=True)
    for start in range(KV_BLOCK, keys, KV_BLOCK):
        block = slice(start, start + KV_BLOCK)
        total += torch.bmm(flat[:, :, block], values[:, block])
        norm += flat[:, :, block].sum(-1, keepdim=True)
    return total.view(num_groups, batch, rows, -1), norm.view(num_groups, batch, rows, 1)


def _row_slices(q: Tensor, k: Tensor) -> list[slice]:
    """Row ranges, multiples of the tile, whose score matrix stays within MAX_SCORES entries."""
    num_groups, batch, rows, _ = q.shape
    height = max(1, MAX_SCORES // (num_groups * batch * k.shape[2] * ROW_TILE)) * ROW_TILE
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]


@dataclass(frozen=True)
class RowLayout:
    """Where the flat tokens of a call go in [B, L] query positions, and back.

    `gather` [B * L] is the token at each query position (0 where padded), `scatter` [T'] the query position of each
    token, T' = T padded to the row tile; `visible` [B, L] how many keys a position sees.
    """

    batch: int
    positions: int
    gather: Tensor
    scatter: Tensor
    visible: Tensor

    @staticmethod
    def build(
        starts: NDArray[np.int64], lengths: NDArray[np.int64], queries_per_key: int, device: torch.device
    ) -> RowLayout:
        """`starts` [B]: keys that exist before the first new token of each sequence; `lengths` [B]: new tokens."""
        unit = ROW_TILE // math.gcd(ROW_TILE, queries_per_key)
        batch, positions = len(lengths), -(-int(lengths.max()) // unit) * unit
        offset = np.arange(positions)
        valid = offset < lengths[:, None]
        first = np.cumsum(lengths) - lengths
        gather = np.where(valid, first[:, None] + offset, 0)
        visible = np.where(valid, starts[:, None] + offset + 1, 1)
        scatter = np.flatnonzero(valid)
        scatter = np.pad(scatter, (0, padded_rows(len(scatter)) - len(scatter)))

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return RowLayout(batch, positions, tensor(gather.reshape(-1)), tensor(scatter), tensor(visible))

    def rows(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """q [T, H, D] -> [K, B, L * G, D]."""
        heads, dim = q.shape[1:]
        groups = heads // num_kv_heads
        laid = q.index_select(0, self.gather).view(self.batch, self.positions, num_kv_heads, groups, dim)
        return laid.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, self.batch, self.positions * groups, dim)

    def tokens(self, out: Tensor) -> Tensor:
        """[K, B, L * G, D] -> [T', H, D]."""
        num_kv_heads, _, rows, dim = out.shape
        groups = rows // self.positions
        laid = out.view(num_kv_heads, self.batch, self.positions, groups, dim).permute(1, 2, 0, 3, 4)
        return laid.reshape(-1, num_kv_heads * groups, dim).index_select(0, self.scatter)

    def row_visible(self, groups: int) -> Tensor:
        """[B, L] -> [B, L * G]."""
        return self.visible.repeat_interleave(groups, dim=1) if groups > 1 else self.visible


class PackedAttention:
    """Causal attention within each of the sequences laid end to end: the trainer's.

    Call it as `attend(layer, q, k, v)`; q [T', H, D], k and v [T', K, D] where T' may be the tokens padded to the row
    tile. Returns [T', H, D].
    """

    def __init__(self, lengths: NDArray[np.int32], *, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        sizes = np.asarray(lengths, dtype=np.int64)
        self.groups = num_heads // num_kv_heads
        self.num_kv_heads = num_kv_heads
        self.layout = RowLayout.build(np.zeros_like(sizes), sizes, self.groups, device)
        self.visible = self.layout.row_visible(self.groups)
        num_keys = -(-int(sizes.max()) // KV_BLOCK) * KV_BLOCK
        offset = np.arange(num_keys)
        first = np.cumsum(sizes) - sizes
        keys = np.where(offset < sizes[:, None], first[:, None] + offset, 0)
        self.keys = torch.from_numpy(keys.reshape(-1)).to(device)
        self.num_keys = num_keys

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = self.layout.rows(q, self.num_kv_heads)
        scale = q.shape[-1] ** -0.5
        if q.device.type == "cpu":
            out = blocked_attention(rows, self._laid(k), self._laid(v), self.visible, scale)
        else:
            out = sdpa(rows, self._laid(k), self._laid(v), self.visible, scale)
        return self.layout.tokens(out)

    def _laid(self, x: Tensor) -> Tensor:
        """[T', K, D] -> [K, B, S, D]."""
        laid = x.index_select(0, self.keys).view(self.layout.batch, self.num_keys, self.num_kv_heads, -1)
        return laid.permute(2, 0, 1, 3).contiguous()


def sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The fallback away from the CPU: same arguments as `blocked_attention`, no promise about bits."""
    seen = torch.arange(k.shape[2], device=q.device) < visible.unsqueeze(-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
