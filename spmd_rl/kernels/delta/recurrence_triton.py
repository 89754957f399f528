"""Recurrence of the gated delta rule on NVIDIA GPUs, the same for prompts, packs and decoding.

A warp has some columns of one head's state in registers, and takes the tokens of its sequence in
turn. What a lane holds is written down here, not chosen by a compiler. So sums have one order in
every call, and a row's bits depend on its own sequence alone.

Shape letters: B sequences, T tokens, C channels; K key and V value heads of sizes D and E.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spmd_rl.kernels.delta.rule import DeltaHeads
from spmd_rl.kernels.delta.states import Places, StateMemory

COLUMNS = 8  # of a state, in a warp
COLUMN_LANES = 4  # lanes that share them out; the others share a column's keys


def recurrence(
    mixed: Tensor, gates: Tensor, places: Places, heads: DeltaHeads, memory: StateMemory
) -> Tensor:
    """Return what the states give of each token, and write those after the pass.

    Shape: mixed [T, C] and gates [2, T, V] fp32, as of `mix_heads`; states in memory [N, V, E, D];
    returns [T, V, E] fp32.
    """
    out = mixed.new_empty(len(mixed), heads.values, heads.value_dim)
    before, after, slots, fresh = memory.for_kernels(out, places)
    grid = len(places.lengths) * heads.values, triton.cdiv(heads.value_dim, COLUMNS)
    _recurrence[grid](
        mixed, *gates, before, after, slots, fresh, places.first, places.lengths, out,
        int(memory.after is not None), *heads, COLUMNS, COLUMN_LANES,
        max(32, triton.next_power_of_2(heads.key_dim)), num_warps=1,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["is_kept"])
def _recurrence(
    mixed, decays, rates, before, after, slots, fresh, first, lengths, out, is_kept,
    KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, COLUMNS: gl.constexpr, COLUMN_LANES: gl.constexpr,
    BLOCK: gl.constexpr,
) -> None:  # fmt: skip
    """A state is kept as [E, D], so that a warp's part of it is contiguous."""
    layout: gl.constexpr = gl.BlockedLayout(
        [COLUMNS // COLUMN_LANES, 4], [COLUMN_LANES, 32 // COLUMN_LANES], [1, 1], [1, 0]
    )
    sequence, head = gl.program_id(0) // VALUE_HEADS, gl.program_id(0) % VALUE_HEADS
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    value = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    inside = is_value[:, None] & is_key[None, :]
    place = (gl.load(slots + sequence).to(gl.int64) * VALUE_HEADS + head) * VALUE_DIM * KEY_DIM
    place = place + value[:, None] * KEY_DIM + key[None, :]
    has_state = inside & (gl.load(fresh + sequence) == 0)
    state = gl.load(before + place, mask=has_state, other=0.0)
    token = gl.load(first + sequence).to(gl.int64)
    end = token + gl.load(lengths + sequence)
    channels: gl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row = mixed + token * channels
    queries = row + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    keys = queries + KEY_HEADS * KEY_DIM
    values = row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    to = out + (token * VALUE_HEADS + head) * VALUE_DIM + value
    decay, rate = decays + token * VALUE_HEADS + head, rates + token * VALUE_HEADS + head
    next_k, next_q = gl.load(keys, is_key, other=0.0), gl.load(queries, is_key, other=0.0)
    next_v = gl.load(values, is_value, other=0.0)
    next_decay, next_rate = gl.load(decay), gl.load(rate)
    while token < end:
        now_k, now_q, now_v, now_decay, now_rate = next_k, next_q, next_v, next_decay, next_rate
        token += 1
        if token < end:  # what the next token needs is on its way while this one is computed
            keys, queries, values = keys + channels, queries + channels, values + channels
            decay, rate = decay + VALUE_HEADS, rate + VALUE_HEADS
            next_k, next_q = gl.load(keys, is_key, other=0.0), gl.load(queries, is_key, other=0.0)
            next_v = gl.load(values, is_value, other=0.0)
            next_decay, next_rate = gl.load(decay), gl.load(rate)
        state = state * now_decay
        read = gl.sum(state * now_k[None, :], axis=1)
        state = state + now_k[None, :] * ((now_v - read) * now_rate)[:, None]
        gl.store(to, gl.sum(state * now_q[None, :], axis=1), mask=is_value)
        to += VALUE_HEADS * VALUE_DIM
    gl.store(after + place, state, mask=inside & (is_kept != 0))
