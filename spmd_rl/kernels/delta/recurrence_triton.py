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

COLUMNS = 16  # of a state, in a warp
COLUMN_LANES = 4  # lanes that share them out; the others share a column's keys


def recurrence(
    mixed: Tensor, gates: Tensor, places: Places, heads: DeltaHeads, memory: StateMemory
) -> Tensor:
    """Return what the states give of each token, and write those after the pass.

    Shape: mixed [T, C] and gates [T, V, 2] fp32, as of `mix_heads`; states in memory [N, V, E, D];
    returns [T, V, E] fp32.
    """
    out = mixed.new_empty(len(mixed), heads.values, heads.value_dim)
    before, after, slots, fresh = memory.for_kernels(out, places)
    grid = len(places.lengths) * heads.values, triton.cdiv(heads.value_dim, COLUMNS)
    _recurrence[grid](
        mixed, gates, before, after, slots, fresh, places.first, places.lengths, out,
        int(memory.after is not None), mixed.shape[1], *heads, COLUMNS, COLUMN_LANES,
        max(32, triton.next_power_of_2(heads.key_dim)), num_warps=1,
    )  # fmt: skip
    return out


@gluon.jit
def _of_token(
    row, head, key, value, KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """Return where a token's key, query and values lie."""
    queries = row + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    values = row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    return queries + KEY_HEADS * KEY_DIM, queries, values


@gluon.jit
def _early(keys, values, gate, is_key, is_value) -> tuple[gl.tensor, ...]:
    """Load what a token needs first."""
    k, v = gl.load(keys, is_key, other=0.0), gl.load(values, is_value, other=0.0)
    return k, v, gl.load(gate), gl.load(gate + 1)


@gluon.jit(do_not_specialize=["is_kept"])
def _recurrence(
    mixed, gates, before, after, slots, fresh, first, lengths, out, is_kept,
    CHANNELS: gl.constexpr, KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, COLUMNS: gl.constexpr,
    COLUMN_LANES: gl.constexpr, BLOCK: gl.constexpr,
) -> None:  # fmt: skip
    """A state is kept as [E, D], so that a warp's part of it is contiguous."""
    layout: gl.constexpr = gl.BlockedLayout(
        [COLUMNS // COLUMN_LANES, 4], [COLUMN_LANES, 32 // COLUMN_LANES], [1, 1], [1, 0]
    )
    index = gl.program_id(0)
    sequence, head = index // VALUE_HEADS, index % VALUE_HEADS
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    value = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    inside = is_value[:, None] & is_key[None, :]
    row = (gl.load(slots + sequence) * VALUE_HEADS + head) * VALUE_DIM + value
    place = row[:, None] * KEY_DIM + key[None, :]
    state = gl.load(before + place, inside & (gl.load(fresh + sequence) == 0), other=0.0)
    token = gl.load(first + sequence).to(gl.int64)
    left = gl.load(lengths + sequence)
    keys, queries, values = _of_token(
        mixed + token * CHANNELS, head, key, value, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    at = token * VALUE_HEADS + head
    to, gate = out + at * VALUE_DIM + value, gates + 2 * at
    next_k, next_v, next_decay, next_rate = _early(keys, values, gate, is_key, is_value)
    while left > 0:
        k, v, decay, rate = next_k, next_v, next_decay, next_rate
        q = gl.load(queries, is_key, other=0.0)
        left -= 1
        keys, queries, values = keys + CHANNELS, queries + CHANNELS, values + CHANNELS
        gate += 2 * VALUE_HEADS
        if left > 0:  # what the next token needs first is on its way while this one is computed
            next_k, next_v, next_decay, next_rate = _early(keys, values, gate, is_key, is_value)
        state = state * decay
        read = gl.sum(state * k[None, :], axis=1)
        state = state + k[None, :] * ((v - read) * rate)[:, None]
        gl.store(to, gl.sum(state * q[None, :], axis=1), mask=is_value)
        to += VALUE_HEADS * VALUE_DIM
    gl.store(after + place, state, mask=inside & (is_kept != 0))
