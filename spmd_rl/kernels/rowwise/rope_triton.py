"""Norm and rotation of query and key heads on NVIDIA GPUs, in one kernel each way.

A program of the forward pass takes heads of one token, as many at a time as the norm's tile has
rows, and sums each along the norm's tree. It reads the other half of a head a second time, from the
nearest cache. Keys may go straight to their pages, and values with them. Positions and slots are
read early (`pdl`).
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.low_precision.kv_codes import KvCoding
from spmd_rl.kernels.low_precision.kv_codes_triton import stored
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from spmd_rl.kernels.rowwise.kv_write_triton import scales_and_counts
from spmd_rl.kernels.rowwise.norm_triton import NUM_WARPS, norm_tile
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.runtime.padding import dense, dense_heads
from spmd_rl.kernels.runtime.pdl import let_next_begin, overlapping, wait

MANY_TOKENS = 1024  # from here on one program for each token fills the processor
MAX_BACKWARD_PROGRAMS = 2048


def qk_norm_rope_forward(
    q: Tensor, k: Tensor, norm: QkNorm, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    """Shape: as `rope.qk_norm_rope`."""
    q, k = dense_heads(q), dense_heads(k)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch_forward(q, k, None, norm, rotary, q_out, k_out)
    return q_out, k_out


def qk_norm_rope_into_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: QkNorm,
    rotary: Rotary,
    target: KvSlots,
    coding: KvCoding | None,
) -> Tensor:
    """Shape: as `rope.qk_norm_rope_into`."""
    q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
    out = q.new_empty(q.shape)
    _launch_forward(q, k, v, norm, rotary, out, target, coding)
    return out


def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    norm: QkNorm,
    rotary: Rotary,
    q_out: Tensor,
    k_out: Tensor | KvSlots,
    coding: KvCoding | None = None,
) -> None:
    """Launch the forward kernel, which writes keys to `k_out`, and values too if it has slots."""
    (num_tokens, q_heads, dim), k_heads = q.shape, k.shape[1]
    heads, block = norm_tile(dim)
    groups = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads) * (1 if v is None else 2)
    keys, values, slots = k_out if isinstance(k_out, KvSlots) else (k_out, None, None)
    _forward[(num_tokens, groups if num_tokens < MANY_TOKENS else 1)](
        q, k, v, _dense(norm.q_weight), _dense(norm.k_weight), *rotary, q_out, keys, values, slots,
        *scales_and_counts(coding), q.stride(0), k.stride(0), 0 if v is None else v.stride(0),
        norm.eps, 0 if slots is None else len(slots), groups, q_heads, k_heads, dim,
        2 * rotary.cos.shape[1], heads, block,
        num_warps=NUM_WARPS, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip


def qk_norm_rope_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, norm: QkNorm, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and the norm's weights."""
    q, k = dense_heads(q), dense_heads(k)
    q_weight, k_weight = _dense(norm.q_weight), _dense(norm.k_weight)
    (num_tokens, q_heads, dim), k_heads = q.shape, k.shape[1]
    heads, block = norm_tile(dim)
    q_tile = min(2 * heads, triton.next_power_of_2(q_heads))
    k_tile = min(2 * heads, triton.next_power_of_2(k_heads))
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    programs = min(num_tokens, MAX_BACKWARD_PROGRAMS)
    partial = q.new_empty(2, programs, dim, dtype=torch.float32)
    _backward[(programs,)](
        dense(grad_q), dense(grad_k), q, k, q_weight, k_weight, *rotary, q_out, k_out, partial,
        q.stride(0), k.stride(0), num_tokens, norm.eps, q_heads, k_heads, q_tile, k_tile, dim,
        2 * rotary.cos.shape[1], block, num_warps=NUM_WARPS,
    )  # fmt: skip
    if q_weight is None or k_weight is None:
        return q_out, k_out, None, None
    sums = partial.sum(1)
    return q_out, k_out, sums[0].to(q_weight.dtype), sums[1].to(k_weight.dtype)


def _dense(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else dense(weight)


@triton.jit(do_not_specialize=["num_slots"])
def _forward(
    q, k, v, q_weight, k_weight, positions, cos, sin, q_out, keys, values, slots, k_scale, v_scale,
    counts, q_stride, k_stride, v_stride, eps, num_slots, groups, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Share a token's groups of heads among programs: those of queries, keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    let_next_begin()
    slot = token
    if slots is not None:
        slot = tl.load(slots + token, mask=token < num_slots, other=-1).to(tl.int64)
    c, s = _angles(positions, cos, sin, token, 1, TURNED, BLOCK)
    wait()
    for group in range(tl.program_id(1), groups, tl.num_programs(1)):
        key_group = group - tl.cdiv(Q_HEADS, HEADS)
        value_group = key_group - tl.cdiv(K_HEADS, HEADS)
        if key_group < 0:
            _rotate(
                q + token * q_stride, q_out, q_weight, token, group, c, s, eps, 1.0, None,
                Q_HEADS, DIM, TURNED, HEADS, BLOCK,
            )  # fmt: skip
        elif value_group < 0:
            if counts is not None:
                is_stored = (slot >= 0) & (key_group == 0)
                tl.atomic_add(counts, 2 * K_HEADS * DIM, mask=is_stored, sem="relaxed")
            _rotate(
                k + token * k_stride, keys, k_weight, slot, key_group, c, s, eps, k_scale, counts,
                K_HEADS, DIM, TURNED, HEADS, BLOCK,
            )  # fmt: skip
        elif values is not None:
            column = value_group * HEADS * DIM + tl.arange(0, HEADS * BLOCK)
            inside = (column < tl.minimum(value_group * HEADS + HEADS, K_HEADS) * DIM) & (slot >= 0)
            copied = tl.load(v + token * v_stride + column, mask=inside, other=0.0)
            copied = stored(copied, v_scale, counts, values)
            tl.store(values + slot * K_HEADS * DIM + column, copied, mask=inside)


@triton.jit
def _rotate(
    x, out, weight, row, group, c, s, eps, scale, counts, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Norm and rotate a group of a token's heads; store nothing if the row is negative.

    With `counts`, codes of the rounded result are stored.
    """
    column = tl.arange(0, BLOCK)
    partner = _partner(column, DIM, TURNED)
    head = group * HEADS + tl.arange(0, HEADS)
    inside = (head < NUM_HEADS)[:, None] & (column < DIM)[None, :]
    own = tl.load(x + head[:, None] * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + head[:, None] * DIM + partner[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    if weight is not None:
        own_scale = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        other_scale = tl.load(weight + partner, mask=column < DIM, other=0.0).to(tl.float32)[
            None, :
        ]
        inverse = tl.rsqrt(tl.sum(own * own, axis=1) / DIM + eps)[:, None]
        own = _rounded(_rounded(own * inverse, x) * own_scale, x)
        other = _rounded(_rounded(other * inverse, x) * other_scale, x)
    turned = own * c[None, :] + other * s[None, :]
    if TURNED < DIM:
        turned = tl.where((column < TURNED)[None, :], turned, own)
    to = out + (row * NUM_HEADS + head)[:, None] * DIM + column[None, :]
    is_stored = inside & (row >= 0)
    if counts is not None:
        turned = tl.where(is_stored, _rounded(turned, x), 0.0)
    tl.store(to, stored(turned, scale, counts, out), mask=is_stored)


@triton.jit
def _rounded(value, like) -> tl.tensor:
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _angles(
    positions, cos, sin, token, DIRECTION: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return cosines [BLOCK], and sines with the sign of the other half, of those that turn."""
    column = tl.arange(0, BLOCK)
    at = tl.load(positions + token).to(tl.int64) * (TURNED // 2) + column % (TURNED // 2)
    c = tl.load(cos + at, mask=column < TURNED, other=0.0)
    s = tl.load(sin + at, mask=column < TURNED, other=0.0)
    return c, s * tl.where(column < TURNED // 2, -DIRECTION, DIRECTION).to(tl.float32)


@triton.jit
def _partner(column, DIM: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """Return the column that each one is turned with; its own where it is not turned."""
    partner = (column + TURNED // 2) % TURNED
    if TURNED < DIM:
        partner = tl.where(column < TURNED, partner, column)
    return partner


@triton.jit(do_not_specialize=["num_tokens"])
def _backward(
    grad_q, grad_k, q, k, q_weight, k_weight, positions, cos, sin, q_out, k_out, partial,
    q_stride, k_stride, num_tokens, eps, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, BLOCK)
    q_sum, k_sum = tl.zeros((Q_TILE, BLOCK), tl.float32), tl.zeros((K_TILE, BLOCK), tl.float32)
    for one in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.cast(one, tl.int64)
        c, s = _angles(positions, cos, sin, token, -1, TURNED, BLOCK)
        for first in tl.static_range(0, Q_HEADS, Q_TILE):
            q_sum += _rotate_back(
                grad_q, q, q_out, q_weight, token, first, q_stride, c, s, eps,
                Q_HEADS, DIM, TURNED, Q_TILE, BLOCK,
            )  # fmt: skip
        for first in tl.static_range(0, K_HEADS, K_TILE):
            k_sum += _rotate_back(
                grad_k, k, k_out, k_weight, token, first, k_stride, c, s, eps,
                K_HEADS, DIM, TURNED, K_TILE, BLOCK,
            )  # fmt: skip
    if q_weight is not None:
        at = partial + tl.program_id(0) * DIM + column
        tl.store(at, tl.sum(q_sum, axis=0), mask=column < DIM)
        tl.store(at + tl.num_programs(0) * DIM, tl.sum(k_sum, axis=0), mask=column < DIM)


@triton.jit
def _rotate_back(
    grad, x, out, weight, token, first, stride, c, s, eps, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store the gradient of x, and return that of the weight for each head."""
    head, column = first + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < NUM_HEADS)[:, None] & (column < DIM)[None, :]
    at = (token * NUM_HEADS + head)[:, None] * DIM
    own = tl.load(grad + at + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = _partner(column, DIM, TURNED)
    other = tl.load(grad + at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    result = own * c[None, :] + other * s[None, :]
    if TURNED < DIM:
        result = tl.where((column < TURNED)[None, :], result, own)
    grad_weight = tl.zeros((HEADS, BLOCK), tl.float32)
    if weight is not None:
        wide = tl.load(
            x + token * stride + head[:, None] * DIM + column[None, :], mask=inside, other=0.0
        )
        wide = wide.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
        normed = wide * inverse
        scale = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        inner = result * scale
        mean = tl.sum(inner * normed, axis=1)[:, None] / DIM
        grad_weight += result * normed
        result = inverse * (inner - normed * mean)
    tl.store(out + at + column[None, :], result.to(out.dtype.element_ty), mask=inside)
    return grad_weight
