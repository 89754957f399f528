"""Gated delta rule on NVIDIA GPUs: its forward pass, the same for prompts, packs and decoding.

One kernel convolves and norms, one runs the recurrence, and one norms what it gives. A program of
the recurrence has some columns of one head's state in registers, and takes the tokens of its
sequence in turn. Tiles do not depend on how many tokens or sequences there are, and multiplication
and addition are never contracted, so a row's bits depend on its own sequence alone. A kernel is
compiled once for sequences with and without a past: compilers lay sums out by what a kernel loads.

Shape letters: B sequences, T tokens, C channels, W taps; K key and V value heads of sizes D and E.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_rl.kernels.delta.rule import DeltaHeads
from spmd_rl.kernels.delta.states import Places, StateMemory
from spmd_rl.kernels.runtime.padding import dense

ROWS = 8  # tokens of a tile that is convolved or normed
COLUMNS = 8  # of a state, in a program of the recurrence
NUM_WARPS = 1  # a warp sums along a row of a state without the others


def conv_heads(
    qkv: Tensor,
    weight: Tensor,
    before: Tensor | None,
    places: Places,
    heads: DeltaHeads,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values: convolved, through SiLU, and the first two normed.

    Shape: qkv [T', C], weight [C, 1, W], before [B, W - 1, C] or None; returns [T, K, D], [T, K, D]
    and [T, V, E], fp32.
    """
    qkv, weight = dense(qkv), dense(weight)
    num_tokens, channels, taps = len(places.sequence), qkv.shape[1], weight.shape[-1]
    has_before, before = before is not None, qkv if before is None else before

    def empty(heads: int, dim: int) -> Tensor:
        return qkv.new_empty(num_tokens, heads, dim, dtype=torch.float32)

    q, k = (empty(heads.keys, heads.key_dim) for _ in range(2))
    v, begin = empty(heads.values, heads.value_dim), 0
    for out, scale in ((q, heads.key_dim**-0.5), (k, 1.0), (v, 0.0)):
        count, dim = out.shape[1:]
        _conv[(triton.cdiv(num_tokens, ROWS), count)](
            qkv, weight, before, places.sequence, places.within, out, num_tokens, begin, scale,
            eps, has_before, channels, count, dim, taps, scale > 0, ROWS,
            triton.next_power_of_2(dim), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        begin += count * dim
    return q, k, v


@triton.jit(do_not_specialize=["num_tokens", "begin", "has_before"])
def _conv(
    x, weight, before, sequence, within, out, num_tokens, begin, scale, eps, has_before,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TAPS: tl.constexpr,
    IS_NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, column = tl.program_id(1), tl.arange(0, BLOCK)
    is_row, is_column = row < num_tokens, column < DIM
    channel = begin + head * DIM + column
    place = tl.load(within + row, mask=is_row, other=0)
    owner = tl.load(sequence + row, mask=is_row, other=0).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        is_new = is_row & (place >= back)
        from_new = tl.load(
            x + (row - back)[:, None] * CHANNELS + channel[None, :],
            mask=is_new[:, None] & is_column[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        kept = owner * (TAPS - 1) + TAPS - 1 + place - back
        is_old = is_row & (place < back) & (has_before != 0)
        from_before = tl.load(
            before + kept[:, None] * CHANNELS + channel[None, :],
            mask=is_old[:, None] & is_column[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        from_new = tl.where((place >= back)[:, None], from_new, from_before)
        factor = tl.load(weight + channel * TAPS + tap, mask=is_column, other=0.0).to(tl.float32)
        total += from_new * factor[None, :]
    mixed = total / (1.0 + tl.exp(-total))
    if IS_NORMED:
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=1) + eps)[:, None] * scale
    to = out + (row * HEADS + head)[:, None] * DIM + column[None, :]
    tl.store(to, mixed, mask=is_row[:, None] & is_column[None, :])


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    places: Places,
    memory: StateMemory,
) -> Tensor:
    """Return what the states give of each token, and write those after the pass.

    Shape: q and k [T, K, D], v [T, V, E], fp32; b and a [T', V], dt_bias and a_log [V]; returns
    [T, V, E] fp32.
    """
    out = torch.empty_like(v)
    key_heads, key_dim = q.shape[1:]
    value_heads, value_dim = v.shape[1:]
    num_sequences = len(places.lengths)
    before, after, slots, fresh = memory
    if slots is None:
        slots = torch.zeros_like(places.lengths, dtype=torch.int64)
    if fresh is None or before is None:
        fresh = torch.full_like(slots, before is None, dtype=torch.bool)
    grid = num_sequences * value_heads, triton.cdiv(value_dim, COLUMNS)
    _recurrence[grid](
        q, k, v, dense(b), dense(a), dense(dt_bias), dense(a_log),
        out if before is None else before, out if after is None else after, slots, fresh,
        places.first, places.lengths, out, after is not None, key_heads, value_heads,
        key_dim, value_dim, COLUMNS, triton.next_power_of_2(key_dim), num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["is_kept"])
def _recurrence(
    q, k, v, b, a, dt_bias, a_log, before, after, slots, fresh, first, lengths, out, is_kept,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A state is kept as [E, D], so that a program's part of it is contiguous."""
    sequence, head = tl.program_id(0) // VALUE_HEADS, tl.program_id(0) % VALUE_HEADS
    value, key = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    inside = (value < VALUE_DIM)[:, None] & (key < KEY_DIM)[None, :]
    slot = tl.load(slots + sequence).to(tl.int64)
    place = (slot * VALUE_HEADS + head) * VALUE_DIM * KEY_DIM
    place = place + value[:, None] * KEY_DIM + key[None, :]
    has_state = inside & (tl.load(fresh + sequence) == 0)
    state = tl.load(before + place, mask=has_state, other=0.0)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    token = tl.load(first + sequence).to(tl.int64)
    end = token + tl.load(lengths + sequence)
    next_k, next_q, next_v, next_a, next_b = _rows_of(
        q, k, v, a, b, token, head, key, value, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    while token < end:
        now_k, now_q, now_v, now_a, now_b = next_k, next_q, next_v, next_a, next_b
        # what the next token needs is on its way while this one is computed
        next_k, next_q, next_v, next_a, next_b = _rows_of(
            q, k, v, a, b, tl.minimum(token + 1, end - 1), head, key, value,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        state = state * _decay(now_a + bias, rate)
        read = tl.sum(state * now_k[None, :], axis=1)
        correction = (now_v - read) / (1.0 + tl.exp(-now_b))
        state = state + now_k[None, :] * correction[:, None]
        mixed = tl.sum(state * now_q[None, :], axis=1)
        to = out + (token * VALUE_HEADS + head) * VALUE_DIM + value
        tl.store(to, mixed, mask=value < VALUE_DIM)
        token += 1
    tl.store(after + place, state, mask=inside & (is_kept != 0))


@triton.jit
def _rows_of(
    q, k, v, a, b, token, head, key, value, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return a token's key, query, values, and what its gates are made of."""
    key_row = token * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)
    value_row = token * VALUE_HEADS + head
    key_at, is_key = key_row * KEY_DIM + key, key < KEY_DIM
    return (
        tl.load(k + key_at, mask=is_key, other=0.0),
        tl.load(q + key_at, mask=is_key, other=0.0),
        tl.load(v + value_row * VALUE_DIM + value, mask=value < VALUE_DIM, other=0.0),
        tl.load(a + value_row).to(tl.float32),
        tl.load(b + value_row).to(tl.float32),
    )


@triton.jit
def _decay(x, rate) -> tl.tensor:
    """Return exp(-rate * softplus(x))."""
    softplus = tl.where(x > 20.0, x, libdevice.log1p(tl.exp(x)))
    return tl.exp(-rate * softplus)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return norm(x) * weight * silu(gate), rounded once, to gate's dtype.

    Shape: x fp32 and gate [..., D], weight [D].
    """
    x, gate = dense(x), dense(gate)
    out, dim = torch.empty_like(gate), x.shape[-1]
    num_rows = x.numel() // dim
    _gated_norm[(triton.cdiv(num_rows, ROWS),)](
        x, gate, dense(weight), out, num_rows, eps, dim, ROWS, triton.next_power_of_2(dim),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(
    x, gate, weight, out, num_rows, eps, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < DIM)[None, :]
    at = row[:, None] * DIM + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0)
    z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    result = normed * scale[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
