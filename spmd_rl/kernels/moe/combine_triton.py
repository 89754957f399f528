"""Sums over a token's slots on NVIDIA GPUs, and gradients of what experts compute between products.

A token's slots are added in fp32 in their order, and the sum is rounded once. No sum depends on an
order of threads.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.moe.order_triton import DeviceOrder
from spmd_rl.kernels.rowwise.activation_triton import silu_times
from spmd_rl.kernels.runtime.pdl import overlapping, wait

BLOCK = 1024
ROW_BLOCK = 4096  # most columns that a program has at once
GRADIENT_WARPS = 4


def sum_slots(y: Tensor, order: DeviceOrder) -> Tensor:
    """Return each token's sum over its slots; zeros for a token without experts.

    Shape: y [S, C]; returns [T, C].
    """
    (num_tokens, per_token), columns = order.rows.shape, y.shape[1]
    out = y.new_empty(num_tokens, columns)
    block = min(triton.next_power_of_2(columns), BLOCK)
    _sum_slots[(num_tokens, triton.cdiv(columns, block))](
        y, order.rows, out, columns, order.num_experts, per_token, order.is_one_token, block,
        enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    return out


class GatedGradients(NamedTuple):
    """Gradients behind the down projection, by row but for `weights`, by slot.

    `weighted` is what the down projection had times the weight, which the gradient of its own
    weight needs. Shape: gate_up [S, 2 F], weighted [S, F], weights [T K] fp32.
    """

    gate_up: Tensor
    weighted: Tensor
    weights: Tensor


def gated_gradients(
    grad: Tensor, gate_up: Tensor, weights: Tensor, order: DeviceOrder
) -> GatedGradients:
    """Return the gradients of a weighed expert's gate, up and weight.

    `grad` is the output's gradient times the down projection, without the weight. `weights` are
    those of slots. Shape: grad [S, F], gate_up [S, 2 F], weights [T K] fp32.
    """
    num_slots, inner = grad.shape
    found = GatedGradients(
        gate_up.new_empty(gate_up.shape), grad.new_empty(grad.shape), weights.new_zeros(num_slots)
    )
    block = min(triton.next_power_of_2(inner), ROW_BLOCK)
    _gated_gradients[(num_slots,)](
        grad, gate_up, weights, order.slots, order.starts, *found, inner, order.num_experts, block,
        num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    return found


@triton.jit
def _sum_slots(
    y, rows, out, columns, num_experts,
    PER_TOKEN: tl.constexpr, ONE_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(PER_TOKEN):
        row = tl.load(rows + token * PER_TOKEN + number)
        if ONE_TOKEN:
            row = tl.where(row < num_experts, number, -1)
        own = tl.load(y + row.to(tl.int64) * columns + column, mask=inside & (row >= 0), other=0.0)
        total = own.to(tl.float32) if number == 0 else total + own.to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_gradients(
    grad, gate_up, weights, slots, starts, grad_gate_up, weighted, grad_weights, inner, num_experts,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(starts + num_experts):
        return
    at = row.to(tl.int64) * inner
    slot = tl.load(slots + row)
    weight = tl.load(weights + slot)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, inner, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < inner
        upper = tl.load(grad + at + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate_up + 2 * at + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(gate_up + 2 * at + inner + column, mask=inside, other=0.0).to(tl.float32)
        hidden = silu_times(g, u).to(weighted.dtype.element_ty).to(tl.float32)
        total += upper * hidden
        tl.store(
            weighted + at + column, (hidden * weight).to(weighted.dtype.element_ty), mask=inside
        )
        upper = upper * weight
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
        dtype = grad_gate_up.dtype.element_ty
        tl.store(grad_gate_up + 2 * at + column, (upper * u * slope).to(dtype), mask=inside)
        tl.store(
            grad_gate_up + 2 * at + inner + column, (upper * g * sigmoid).to(dtype), mask=inside
        )
    tl.store(grad_weights + slot, tl.sum(total, 0))
