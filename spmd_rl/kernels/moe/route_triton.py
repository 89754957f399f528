"""Choice of experts on NVIDIA GPUs, in one launch, with the hash of the routes (route_hash.py).

A program has one row and one warp, so a row's sum has one tree. The order of experts is that of
their probabilities as whole numbers, then of lower ids, so it is exact.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.moe.route_hash import open_hash
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.rows_in_use import rows_in_use
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.pdl import overlapping, wait

ROUTE_WARPS = 1
HASH_FACTOR = tl.constexpr(6364136223846793005)
HASH_SHIFT = tl.constexpr(29)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def route_on_gpu(logits: Tensor, num_chosen: int, *, normalizes: bool) -> ExpertRoutes:
    """Choose as `router.route` does, and add the routes to the hash that is open, if one is.

    A row that nobody uses (rows_in_use.py) gets E as all its experts, which is none, and weights of
    zero. Gradients go to the logits through the weights.
    Shape: logits [T, E] fp32.
    """
    ids = logits.new_empty(len(logits), num_chosen, dtype=torch.int64)
    found = open_hash()
    first = found is not None and found.state is None
    if found is not None and found.state is None:
        found.state = ids.new_empty(len(logits))
    state = None if found is None else found.state
    weights = call(_Route, logits, ids, state, first, rows_in_use(), normalizes, False)
    return ExpertRoutes(ids, weights)


def weights_on_gpu(logits: Tensor, ids: Tensor, *, normalizes: bool) -> Tensor:
    """Return the weights of these experts, as `route_on_gpu` gives them to those that it chooses.

    Gradients go to the logits. Shape: logits [T, E] fp32, ids [T, K] int64 in ascending order;
    returns [T, K] fp32.
    """
    weights: Tensor = call(
        _Route, logits, ids.contiguous(), None, False, rows_in_use(), normalizes, True
    )
    return weights


def note_on_gpu(ids: Tensor) -> None:
    """Add a layer's routes to the hash that is open, in one launch. Shape: ids [T, K] int64."""
    if (found := open_hash()) is None:
        return
    first, (num_rows, num_chosen) = found.state is None, ids.shape
    if found.state is None:
        found.state = ids.new_empty(num_rows)
    slots = triton.next_power_of_2(num_chosen)
    _note[(num_rows,)](
        ids.contiguous(), found.state, num_chosen, slots, first, num_warps=ROUTE_WARPS,
        **overlapping(),
    )  # fmt: skip


def without_padding(routes: ExpertRoutes, num_experts: int) -> ExpertRoutes:
    """Return the routes of rows that are used; others go to no expert (`route_on_gpu`)."""
    if (used := rows_in_use()) is None:
        return routes
    is_used = (used >= 0).unsqueeze(1)
    ids = torch.where(is_used, routes.ids, num_experts)
    return ExpertRoutes(ids, torch.where(is_used, routes.weights, 0.0))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        state: Tensor | None,
        first: bool,
        used: Tensor | None,
        normalizes: bool,
        is_given: bool,
    ) -> Tensor:
        logits, (num_rows, num_experts) = dense(logits), logits.shape
        weights = logits.new_empty(ids.shape)
        _route[(num_rows,)](
            logits, ids if used is None else used, ids, weights, ids if state is None else state,
            num_experts, ids.shape[1], triton.next_power_of_2(num_experts),
            triton.next_power_of_2(ids.shape[1]), normalizes, used is not None, state is not None,
            first, is_given, num_warps=ROUTE_WARPS, enable_fp_fusion=False, **overlapping(),
        )  # fmt: skip
        ctx.save_for_backward(logits, ids)
        ctx.normalizes = normalizes
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        out, (num_rows, num_experts) = torch.empty_like(logits), logits.shape
        _route_backward[(num_rows,)](
            grads[0].contiguous(), logits, ids, out, num_experts, ids.shape[1],
            triton.next_power_of_2(num_experts), ctx.normalizes, num_warps=ROUTE_WARPS,
        )  # fmt: skip
        return out, None, None, None, None, None, None


@triton.jit
def _route(
    logits, used, ids, weights, state, num_experts, NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, NORMALIZES: tl.constexpr, HAS_USED: tl.constexpr,
    HAS_STATE: tl.constexpr, FIRST: tl.constexpr, IS_GIVEN: tl.constexpr,
) -> None:  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    wait()
    is_expert = column < num_experts
    x = tl.load(logits + row * num_experts + column, mask=is_expert, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    p = p / tl.sum(p, 0)
    # a larger probability is a larger number, and of equal ones a lower id is
    key = (p.to(tl.int32, bitcast=True) & MAGNITUDE).to(tl.int64) * BLOCK + (BLOCK - 1 - column)
    key = tl.where(is_expert, key, -1)
    left = tl.full((BLOCK,), BLOCK, tl.int32)  # ids of the chosen that have no slot yet
    for number in tl.static_range(NUM_CHOSEN):
        if IS_GIVEN:
            best = column == tl.load(ids + row * NUM_CHOSEN + number)
        else:
            best = key == tl.max(key, 0)
        left = tl.where(best, column, left)
        key = tl.where(best, -1, key)
    own_ids, own_weights = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    total = 0.0
    for number in tl.static_range(NUM_CHOSEN):
        lowest = tl.min(left, 0)
        weight = tl.sum(tl.where(column == lowest, p, 0.0), 0)
        left = tl.where(left == lowest, BLOCK, left)
        own_ids = tl.where(slot == number, lowest, own_ids)
        own_weights = tl.where(slot == number, weight, own_weights)
        total = weight if number == 0 else total + weight
    if NORMALIZES:
        own_weights = own_weights / total
    if HAS_USED:
        is_used = tl.load(used + row) >= 0
        own_ids = tl.where(is_used, own_ids, num_experts)
        own_weights = tl.where(is_used, own_weights, 0.0)
    at, is_slot = row * NUM_CHOSEN + slot, slot < NUM_CHOSEN
    tl.store(ids + at, own_ids.to(tl.int64), mask=is_slot)
    tl.store(weights + at, own_weights, mask=is_slot)
    if HAS_STATE:
        _add_to_hash(state + row + tl.arange(0, 1), own_ids, slot, NUM_CHOSEN, FIRST)


@triton.jit
def _note(
    ids, state, NUM_CHOSEN: tl.constexpr, SLOTS: tl.constexpr, FIRST: tl.constexpr
) -> None:  # fmt: skip
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    wait()
    own = tl.load(ids + row * NUM_CHOSEN + slot, mask=slot < NUM_CHOSEN, other=0).to(tl.int32)
    _add_to_hash(state + row + tl.arange(0, 1), own, slot, NUM_CHOSEN, FIRST)


@triton.jit
def _route_backward(
    grad, logits, ids, out, num_experts,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, NORMALIZES: tl.constexpr,
) -> None:  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, is_expert = row * num_experts + column, column < num_experts
    x = tl.load(logits + at, mask=is_expert, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    p = p / tl.sum(p, 0)
    upper, is_chosen = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int1)
    for number in tl.static_range(NUM_CHOSEN):
        own = column == tl.load(ids + row * NUM_CHOSEN + number)
        upper = tl.where(own, tl.load(grad + row * NUM_CHOSEN + number), upper)
        is_chosen = is_chosen | own
    if NORMALIZES:
        total = tl.sum(tl.where(is_chosen, p, 0.0), 0)
        mean = tl.sum(upper * p, 0) / total
        upper = tl.where(is_chosen, (upper - mean) / total, 0.0)
    tl.store(out + at, p * (upper - tl.sum(upper * p, 0)), mask=is_expert)


@triton.jit
def _add_to_hash(at, ids, slot, NUM_CHOSEN: tl.constexpr, FIRST: tl.constexpr) -> None:
    hashed = tl.zeros((1,), tl.int64) if FIRST else tl.load(at)
    for number in tl.static_range(NUM_CHOSEN):
        expert = tl.sum(tl.where(slot == number, ids, 0), 0).to(tl.int64)
        hashed = (hashed + expert + 1) * HASH_FACTOR
        hashed = hashed ^ (hashed >> HASH_SHIFT)
    tl.store(at, hashed)
