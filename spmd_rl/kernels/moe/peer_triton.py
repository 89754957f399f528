"""Rows to and from the memory of other GPUs of a host, whose addresses are in a table.

`push` writes this rank's rows into the memory of every rank. `sum_peers` reads this rank's slots
where their experts' ranks have put them. It adds them in fp32 in their order, as `sum_slots` does,
and rounds once.

Shape letters: T rows of a rank, K experts of a token, E experts, C columns; P ranks, S rows of a
rank's slots.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.moe.expert_gather import ExpertBlocks, SlotRows
from spmd_rl.kernels.moe.router import ExpertRoutes

BLOCK = 1024


class PeerTables(NamedTuple):
    """Addresses of each rank's memory, in the order of ranks. Shape: [P] int64 on the device.

    `rows` have [P T, C], `ids` [P T, K] int64, `weights` [P T, K] fp32, and `slots` [P T, K, C].
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    slots: Tensor


def push(
    x: Tensor, routes: ExpertRoutes, peers: PeerTables, blocks: ExpertBlocks, rank: int
) -> None:
    """Write rows, weights and the ids among a rank's own experts to every rank.

    Shape: x [T, C], contiguous.
    """
    (num_rows, columns), per_token = x.shape, routes.ids.shape[1]
    block = min(triton.next_power_of_2(columns), BLOCK)
    _push[(num_rows, blocks.num_ranks, triton.cdiv(columns, block))](
        x, routes.ids, routes.weights, *peers[:3], columns, rank * num_rows, blocks.num_own,
        per_token, triton.next_power_of_2(per_token), block,
    )  # fmt: skip


def place_slots(given: SlotRows, out: Tensor) -> None:
    """Copy each slot's row to its place; slots without a row are left. Shape: out [P T, K, C]."""
    num_slots, columns = given.rows.numel(), given.y.shape[1]
    block = min(triton.next_power_of_2(columns), BLOCK)
    _place_slots[(num_slots, triton.cdiv(columns, block))](given.y, given.rows, out, columns, block)


def sum_peers(
    ids: Tensor, peers: PeerTables, blocks: ExpertBlocks, rank: int, like: Tensor
) -> Tensor:
    """Return each token's sum over its slots; zeros for a token without experts.

    Shape: ids [T, K] int64; returns [T, C], as `like` is.
    """
    (num_rows, per_token), columns = ids.shape, like.shape[1]
    out = like.new_empty(like.shape)
    block = min(triton.next_power_of_2(columns), BLOCK)
    _sum_peers[(num_rows, triton.cdiv(columns, block))](
        ids, peers.slots, out, columns, rank * num_rows, blocks.num_own, blocks.num_experts,
        per_token, block, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first_row"])
def _push(
    x, ids, weights, rows_of, ids_of, weights_of, columns, first_row, num_own,
    PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, peer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    at = first_row + row
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    to_rows = tl.load(rows_of + peer).to(tl.pointer_type(x.dtype.element_ty))
    own = tl.load(x + row * columns + column, mask=inside)
    tl.store(to_rows + at * columns + column, own, mask=inside)
    slot = tl.arange(0, SLOTS)
    is_slot = (slot < PER_TOKEN) & (part == 0)
    local = tl.load(ids + row * PER_TOKEN + slot, mask=is_slot, other=0) - peer * num_own
    local = tl.where((local >= 0) & (local < num_own), local, num_own)
    weight = tl.load(weights + row * PER_TOKEN + slot, mask=is_slot, other=0.0)
    to_ids = tl.load(ids_of + peer).to(tl.pointer_type(tl.int64))
    to_weights = tl.load(weights_of + peer).to(tl.pointer_type(tl.float32))
    tl.store(to_ids + at * PER_TOKEN + slot, local, mask=is_slot)
    tl.store(to_weights + at * PER_TOKEN + slot, weight, mask=is_slot)


@triton.jit
def _place_slots(y, rows, out, columns, BLOCK: tl.constexpr) -> None:
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + slot).to(tl.int64)
    if row < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(y + row * columns + column, mask=column < columns)
    tl.store(out + slot * columns + column, own, mask=column < columns)


@triton.jit(do_not_specialize=["first_row"])
def _sum_peers(
    ids, slots_of, out, columns, first_row, num_own, num_experts,
    PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(PER_TOKEN):
        expert = tl.load(ids + token * PER_TOKEN + number)
        has_expert = expert < num_experts
        peer = tl.where(has_expert, expert // num_own, 0)
        slots = tl.load(slots_of + peer).to(tl.pointer_type(out.dtype.element_ty))
        at = ((first_row + token) * PER_TOKEN + number) * columns + column
        own = tl.load(slots + at, mask=inside & has_expert, other=0.0).to(tl.float32)
        total = own if number == 0 else total + own
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)
