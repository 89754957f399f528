"""Convolution before the gated delta rule, with its norms, on NVIDIA GPUs: forward and backward.

The forward kernel serves prompts, packs and decoding. It is compiled once for sequences with and
without a past, for compilers lay sums out by what a kernel loads.

Shape letters: B sequences, T tokens, C channels, W taps; K key and V value heads of sizes D and E.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_rl.kernels.delta.rule import NORM_EPS, DeltaHeads, DeltaWeights
from spmd_rl.kernels.delta.states import Places, StateMemory
from spmd_rl.kernels.runtime.padding import dense

ROWS = 8  # tokens of a tile
SPREAD_ROWS, SPREAD_COLUMNS = 64, 64  # of a tile of the second backward kernel
KEPT_COLUMNS = 256  # of a tile that is handed on


def mix_heads(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    places: Places,
    heads: DeltaHeads,
    memory: StateMemory,
) -> tuple[Tensor, Tensor]:
    """Return what the recurrence reads, and hand on the last rows before the convolution.

    These are queries, keys and values: convolved, through SiLU, and the first two normed. And the
    gates: how much is left of a state, and how much of a correction is taken.
    Shape: qkv [T', C], b and a [T', V], states in memory [N, W - 1, C]; returns [T, C] and
    [T, V, 2], fp32.
    """
    qkv, weight = dense(qkv), dense(weights.conv)
    out = qkv.new_empty(len(places.sequence), qkv.shape[1], dtype=torch.float32)
    gates = out.new_empty(len(out), heads.values, 2)
    before, after, slots, fresh = memory.for_kernels(qkv, places)
    _conv[_grid(out, heads)](
        qkv, dense(b), dense(a), weight, dense(weights.dt_bias), dense(weights.a_log), before,
        slots, fresh, places.sequence, places.within, out, gates, len(out), heads.key_dim**-0.5,
        NORM_EPS, heads.served, *_sizes(qkv, weight, heads), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if memory.after is not None:
        num_kept = weight.shape[-1] - 1
        _keep_rows[(len(places.lengths), triton.cdiv(qkv.shape[1], KEPT_COLUMNS))](
            qkv, before, after, slots, fresh, places.first, places.lengths, qkv.shape[1], num_kept,
            triton.next_power_of_2(num_kept), KEPT_COLUMNS, num_warps=2,
        )  # fmt: skip
    return out, gates


def conv_gradients(
    qkv: Tensor, weight: Tensor, places: Places, heads: DeltaHeads, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `qkv` and `weight`, for sequences that begin without a past.

    Shape: grad [T, V, D + D + E] fp32, of the query, the key and the values of each value head.
    """
    qkv, weight = dense(qkv), dense(weight)
    num_tokens, channels, taps = len(grad), qkv.shape[1], weight.shape[-1]
    of_total = torch.empty(num_tokens, channels, dtype=torch.float32, device=qkv.device)
    _conv_backward[_grid(of_total, heads)](
        qkv, weight, places.within, grad, of_total, num_tokens, heads.key_dim**-0.5, NORM_EPS,
        heads.served, *_sizes(qkv, weight, heads), num_warps=4,
    )  # fmt: skip
    grad_qkv = torch.empty_like(qkv)
    grad_qkv[num_tokens:] = 0
    num_tiles = triton.cdiv(num_tokens, SPREAD_ROWS)
    partial = of_total.new_empty(num_tiles, channels, taps)
    _conv_spread[(num_tiles, triton.cdiv(channels, SPREAD_COLUMNS))](
        qkv, weight, places.within, of_total, grad_qkv, partial, num_tokens, channels, taps,
        SPREAD_ROWS, SPREAD_COLUMNS, num_warps=4,
    )  # fmt: skip
    return grad_qkv, partial.sum(0).view(weight.shape).to(weight.dtype)


def _grid(out: Tensor, heads: DeltaHeads) -> tuple[int, int]:
    return triton.cdiv(len(out), ROWS), 2 * heads.keys + heads.values


def _sizes(qkv: Tensor, weight: Tensor, heads: DeltaHeads) -> tuple[int, ...]:
    block = triton.next_power_of_2(max(heads.key_dim, heads.value_dim))
    sizes = qkv.shape[1], heads.keys, heads.key_dim, heads.value_dim, weight.shape[-1]
    return *sizes, ROWS, block


@triton.jit
def _columns_of(
    head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return whether a head has queries or keys, its channels, and which of these exist."""
    column, value_head = tl.arange(0, BLOCK), head - 2 * KEY_HEADS
    is_key = value_head < 0
    begin = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM)
    return is_key, begin + column, column < tl.where(is_key, KEY_DIM, VALUE_DIM)


@triton.jit(do_not_specialize=["num_tokens"])
def _conv(
    x, b, a, weight, dt_bias, a_log, before, slots, fresh, sequence, within, out, gates,
    num_tokens, scale, eps, SERVED: tl.constexpr, CHANNELS: tl.constexpr, KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    is_key, channel, is_column = _columns_of(head, KEY_HEADS, KEY_DIM, VALUE_DIM, BLOCK)
    is_row = row < num_tokens
    place = tl.load(within + row, mask=is_row, other=0)
    owner = tl.load(sequence + row, mask=is_row, other=0)
    has_past = tl.load(fresh + owner, mask=is_row, other=1) == 0
    slot = tl.load(slots + owner, mask=is_row, other=0).to(tl.int64)
    total = _sums(
        x, weight, before, row, place, slot, is_row, has_past, channel, is_column, CHANNELS, TAPS,
        ROWS, BLOCK,
    )  # fmt: skip
    mixed = total / (1.0 + tl.exp(-total))
    norm = tl.rsqrt(tl.sum(mixed * mixed, axis=1) + eps) * tl.where(head < KEY_HEADS, scale, 1.0)
    mixed = mixed * tl.where(is_key, norm, 1.0)[:, None]
    to = out + row[:, None] * CHANNELS + channel[None, :]
    tl.store(to, mixed, mask=is_row[:, None] & is_column[None, :])
    _write_gates(b, a, dt_bias, a_log, gates, row, is_row, head - 2 * KEY_HEADS, KEY_HEADS * SERVED)


@triton.jit
def _sums(
    x, weight, before, row, place, slot, is_row, has_past, channel, is_column,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Convolve rows, of which some may be among those before the pass."""
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        is_new, is_old = is_row & (place >= back), has_past & (place < back)
        new = tl.load(
            x + (row - back)[:, None] * CHANNELS + channel[None, :],
            mask=is_new[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        kept = slot * (TAPS - 1) + TAPS - 1 + place - back
        old = tl.load(
            before + kept[:, None] * CHANNELS + channel[None, :],
            mask=is_old[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        factor = tl.load(weight + channel * TAPS + tap, mask=is_column, other=0.0).to(tl.float32)
        total += tl.where((place >= back)[:, None], new, old).to(tl.float32) * factor[None, :]
    return total


@triton.jit
def _write_gates(b, a, dt_bias, a_log, gates, row, is_row, head, VALUE_HEADS: tl.constexpr) -> None:
    """Write the gates of a value head; other heads, below 0, have none."""
    at, is_gate = row * VALUE_HEADS + head, is_row & (head >= 0)
    bias = tl.load(dt_bias + head, mask=head >= 0, other=0.0).to(tl.float32)
    speed = tl.exp(tl.load(a_log + head, mask=head >= 0, other=0.0).to(tl.float32))
    step = tl.load(a + at, mask=is_gate, other=0.0).to(tl.float32) + bias
    step = tl.where(step > 20.0, step, libdevice.log1p(tl.exp(step)))  # softplus
    tl.store(gates + 2 * at, tl.exp(-speed * step), mask=is_gate)
    rate = tl.load(b + at, mask=is_gate, other=0.0).to(tl.float32)
    tl.store(gates + 2 * at + 1, 1.0 / (1.0 + tl.exp(-rate)), mask=is_gate)


@triton.jit
def _keep_rows(
    x, before, after, slots, fresh, first, lengths, CHANNELS: tl.constexpr,
    KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Hand on the last rows before the convolution: of those before the pass if it has too few."""
    owner, place = tl.program_id(0), tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (place < KEPT)[:, None] & (channel < CHANNELS)[None, :]
    length = tl.load(lengths + owner)
    has_past = tl.load(fresh + owner) == 0
    slot = tl.load(slots + owner).to(tl.int64)
    earlier = place + length  # counted from the first of the rows before
    is_new = (earlier >= KEPT)[:, None]
    row = tl.load(first + owner).to(tl.int64) + earlier - KEPT
    new = tl.load(x + row[:, None] * CHANNELS + channel[None, :], mask=inside & is_new, other=0.0)
    kept = (slot * KEPT + earlier)[:, None] * CHANNELS + channel[None, :]
    is_old = inside & (is_new == 0) & has_past
    old = tl.load(before + kept, mask=is_old, other=0.0)
    tl.debug_barrier()  # another thread may read the old rows where this one writes
    to = after + (slot * KEPT + place)[:, None] * CHANNELS + channel[None, :]
    tl.store(to, tl.where(is_new, new, old), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _conv_backward(
    x, weight, within, grad, of_total, num_tokens, scale, eps, SERVED: tl.constexpr,
    CHANNELS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Go back through the norm and SiLU, to the sums of the convolution."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    is_key, channel, is_column = _columns_of(head, KEY_HEADS, KEY_DIM, VALUE_DIM, BLOCK)
    is_row = row < num_tokens
    inside = is_row[:, None] & is_column[None, :]
    place = tl.load(within + row, mask=is_row, other=0)
    total = _sums(
        x, weight, x, row, place, row, is_row, is_row & (place < 0), channel, is_column, CHANNELS,
        TAPS, ROWS, BLOCK,
    )  # fmt: skip
    width = 2 * KEY_DIM + VALUE_DIM
    served = tl.where(is_key, SERVED, 1)
    first_head = tl.where(is_key, head % KEY_HEADS * SERVED, head - 2 * KEY_HEADS)
    begin = tl.where(is_key, head // KEY_HEADS * KEY_DIM, 2 * KEY_DIM)
    of_out = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in tl.static_range(SERVED):
        at = (row * KEY_HEADS * SERVED + first_head + number) * width
        at = grad + (at + begin)[:, None] + tl.arange(0, BLOCK)[None, :]
        of_out += tl.load(at, mask=inside & (number < served), other=0.0)
    gate = 1.0 / (1.0 + tl.exp(-total))
    mixed = total * gate
    norm = tl.rsqrt(tl.sum(mixed * mixed, axis=1) + eps)
    along = tl.sum(mixed * of_out, axis=1) * norm * norm
    of_normed = (of_out - mixed * along[:, None]) * norm[:, None]
    of_normed = of_normed * tl.where(head < KEY_HEADS, scale, 1.0)
    of_mixed = tl.where(is_key, of_normed, of_out)
    found = of_mixed * gate * (1.0 + total * (1.0 - gate))
    tl.store(of_total + row[:, None] * CHANNELS + channel[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _conv_spread(
    x, weight, within, of_total, of_x, of_weight, num_tokens, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Go back through the sums, to the rows, and to the weights as sums of each tile of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_tokens, channel < CHANNELS
    inside = is_row[:, None] & is_column[None, :]
    at = row[:, None] * CHANNELS + channel[None, :]
    here = tl.load(of_total + at, mask=inside, other=0.0)
    place = tl.load(within + row, mask=is_row, other=0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        later = row + back
        # a later token of the same sequence reads this one
        is_read = later < num_tokens
        is_read = is_read & (tl.load(within + later, mask=is_read, other=0) >= back)
        grad = tl.load(
            of_total + at + back * CHANNELS, mask=is_read[:, None] & is_column[None, :], other=0.0
        )
        factor = tl.load(weight + channel * TAPS + tap, mask=is_column, other=0.0).to(tl.float32)
        total += grad * factor[None, :]
        before = tl.load(
            x + at - back * CHANNELS, mask=inside & (place >= back)[:, None], other=0.0
        ).to(tl.float32)
        sums = tl.sum(here * before, axis=0)
        to = (tl.program_id(0).to(tl.int64) * CHANNELS + channel) * TAPS + tap
        tl.store(of_weight + to, sums, mask=is_column)
    tl.store(of_x + at, total.to(of_x.dtype.element_ty), mask=inside)
