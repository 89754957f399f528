"""Experts of a mixture on NVIDIA GPUs, all at once: products forward and backward, for any rows.

The chain over K is that of `linear`, so an engine's steps, its prompts and a trainer have the bits
of one expert after the other. The backward pass keeps gate and up, and computes the activation
again. The down projection's gradient is first without the weights of slots, as these need it.

Shape letters: T tokens, K experts of a token, S = T K slots, E experts, C hidden, F inner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.low_precision.block_codes import Weight
from spmd_rl.kernels.moe.coded_grouped_triton import coded_grouped_matmul
from spmd_rl.kernels.moe.combine_triton import gated_gradients, sum_slots
from spmd_rl.kernels.moe.expert_addresses import Addresses, KeptAddresses, addresses
from spmd_rl.kernels.moe.grouped_tiles import OUTER, GroupedTile, Tiles, choose_tiles
from spmd_rl.kernels.moe.grouped_triton import (
    grouped_matmul,
    grouped_matmul_turned,
    grouped_outer,
    rows_to_experts,
)
from spmd_rl.kernels.moe.order_triton import DeviceOrder, order_of_token, order_on_device
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.rowwise.activation_triton import silu_mul_forward
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import dense

Weights = Sequence[Weight]  # one of each expert
ONES = 16  # columns of the product that sums gradients of biases


class ExpertWeights(NamedTuple):
    """The weights of all experts. Shape: gate and up [F, C] each, down [C, F] each."""

    gate: Weights
    up: Weights
    down: Weights


def order_slots(routes: ExpertRoutes, num_experts: int) -> DeviceOrder:
    """Order the slots by expert, with tiles for as many rows. The host does not wait."""
    tiles = choose_tiles(routes.ids.numel(), num_experts)
    return order_on_device(routes.ids, num_experts, tiles.m)


def _tiles_of(order: DeviceOrder) -> Tiles:
    return choose_tiles(order.num_slots, order.num_experts)


def experts_output(
    x: Tensor, routes: ExpertRoutes, weights: ExpertWeights, kept: KeptAddresses
) -> Tensor:
    """Return the sum of what each token's experts give it.

    Shape: x [T, C] bf16; returns [T, C].
    """
    if not torch.is_grad_enabled():
        order = _order_for_sums(routes, len(weights.gate))
        return sum_slots(slots_output(x, order, routes.weights, weights, kept), order)
    order = order_slots(routes, len(weights.gate))
    flat = (one for part in weights for one in part)
    out: Tensor = _Experts.apply(dense(x), routes.weights, order, *flat)
    return out


def slots_output(
    x: Tensor, order: DeviceOrder, scales: Tensor, weights: ExpertWeights, kept: KeptAddresses
) -> Tensor:
    """Return what each slot's expert gives it, by row, times its scale. No gradients.

    Rows that no expert has are not set. Shape: x [T, C] bf16, scales [T, K] fp32; returns [S, C].
    """
    tiles = _tiles_of(order)
    gate_up = kept.of("gate, up", [weights.gate, weights.up])
    hidden = _product(dense(x), gate_up, order, tiles.gated, gathers=True, gated=True)
    down = kept.of("down", [weights.down])
    return _product(hidden, down, order, tiles.down, scales=scales)


def _product(
    x: Tensor,
    weights: Addresses,
    order: DeviceOrder,
    tile: GroupedTile,
    *,
    gathers: bool = False,
    gated: bool = False,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `grouped_matmul` in this tile; of codes with their own tiles.

    Raises: ConfigError for codes whose products are to be rounded to another dtype than x's.
    """
    if weights.scales is not None:
        if dtype is not None:
            raise ConfigError("experts with biases have no kernel for codes on GPUs")
        return coded_grouped_matmul(x, weights, order, gathers=gathers, gated=gated, scales=scales)
    return grouped_matmul(
        x, weights, order, tile, gathers=gathers, gated=gated, scales=scales, dtype=dtype
    )


def _order_for_sums(routes: ExpertRoutes, num_experts: int) -> DeviceOrder:
    """Return an order for `slots_output` and `sum_slots`, which need no launch for one token."""
    if len(routes.ids) > 1:
        return order_slots(routes, num_experts)
    tiles = choose_tiles(routes.ids.numel(), num_experts)
    return order_of_token(routes.ids, num_experts, tiles.m)


class _Experts(torch.autograd.Function):
    """Gate and up, their activation, down, and the sum over slots."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: Tensor, order: DeviceOrder, *weights: Tensor
    ) -> Tensor:
        tiles = _tiles_of(order)
        gate_up_table, down_table = _tables(weights, order.num_experts)
        gate_up = grouped_matmul(x, gate_up_table, order, tiles.up, gathers=True)
        hidden = silu_mul_forward(*gate_up.chunk(2, dim=-1))  # made again, never kept
        y = grouped_matmul(hidden, down_table, order, tiles.down, scales=scales)
        ctx.order = order
        ctx.save_for_backward(x, scales, gate_up, *weights)
        return sum_slots(y, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scales, gate_up, *weights = ctx.saved_tensors
        order: DeviceOrder = ctx.order
        needs_x, _, _, *needs = ctx.needs_input_grad
        gate_up_table, down_table = _tables(weights, order.num_experts)
        grad = dense(grads[0].to(x.dtype))
        turned = _tiles_of(order).turned
        inner = grouped_matmul_turned(grad, down_table, order, turned, gathers=True)
        found = gated_gradients(inner, gate_up, scales, order)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if any(needs[2 * order.num_experts :]):
            down = grouped_outer(grad, found.weighted, order, OUTER, gathers_grad=True)
            of_weights[2 * order.num_experts :] = down.unbind()
        if any(needs[: 2 * order.num_experts]):
            both = grouped_outer(found.gate_up, x, order, OUTER, gathers_x=True)
            gate, up = both.chunk(2, dim=1)
            of_weights[: 2 * order.num_experts] = [*gate.unbind(), *up.unbind()]
        of_x = None
        if needs_x:
            of_slots = grouped_matmul_turned(found.gate_up, gate_up_table, order, turned)
            of_x = sum_slots(of_slots, order)
        return of_x, found.weights.view_as(scales), None, *of_weights


def _tables(weights: Sequence[Tensor], num_experts: int) -> tuple[Addresses, Addresses]:
    gate, up, down = (
        weights[first : first + num_experts] for first in range(0, 3 * num_experts, num_experts)
    )
    return addresses([gate, up]), addresses([down])


def grouped_linear(
    x: Tensor,
    weights: Weights,
    order: DeviceOrder,
    kept: KeptAddresses,
    name: str,
    *,
    gathers: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return each row times the weight of its expert, as `linear` of the expert alone would.

    It is rounded to x's dtype, or to `dtype`. `name` is the weights' in `kept`, for passes without
    gradients.
    Shape: x [T, C] where it gathers, else [S, C]; weights [N, C] each; returns [S, N].
    """
    if not torch.is_grad_enabled():
        tiles = _tiles_of(order)
        table = kept.of(name, [weights])
        return _product(dense(x), table, order, tiles.up, gathers=gathers, dtype=dtype)
    out: Tensor = _GroupedLinear.apply(dense(x), order, gathers, dtype, *weights)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order: DeviceOrder,
        gathers: bool,
        dtype: torch.dtype | None,
        *weights: Tensor,
    ) -> Tensor:
        tiles, table = _tiles_of(order), addresses([weights])
        ctx.order, ctx.gathers = order, gathers
        ctx.save_for_backward(x, *weights)
        return grouped_matmul(x, table, order, tiles.up, gathers=gathers, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        order, gathers = ctx.order, ctx.gathers
        needs_x, _, _, _, *needs = ctx.needs_input_grad
        grad, of_x = dense(grads[0].to(x.dtype)), None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if needs_x:
            of_x = grouped_matmul_turned(grad, addresses([weights]), order, _tiles_of(order).turned)
            of_x = sum_slots(of_x, order) if gathers else of_x
        if any(needs):
            of_weights = grouped_outer(grad, x, order, OUTER, gathers_x=gathers).unbind()
        return of_x, None, None, None, *of_weights


def add_biases(
    product: Tensor, biases: Sequence[Tensor], order: DeviceOrder, dtype: torch.dtype
) -> Tensor:
    """Add the bias of each row's expert, and round once to `dtype`.

    Shape: product [S, N] fp32, biases [N] each; returns [S, N].
    """
    return call(_AddBiases, product, order, dtype, *biases)


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Tensor, order: DeviceOrder, dtype: torch.dtype, *biases: Tensor
    ) -> Tensor:
        ctx.order, ctx.dtype = order, biases[0].dtype
        row = torch.arange(len(product), dtype=order.starts.dtype, device=product.device)
        expert = torch.searchsorted(order.starts[1:], row, right=True)
        of_rows = torch.stack(biases).index_select(0, expert.clamp_(max=len(biases) - 1))
        return (product + of_rows).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = dense(grads[0].to(ctx.dtype))
        ones = grad.new_ones(len(grad), ONES)  # a product's columns, all alike
        sums = grouped_outer(grad, ones, ctx.order, OUTER)
        return grads[0].float(), None, None, *sums[:, :, 0].unbind()


def scaled_sum(
    y: Tensor, scales: Tensor, order: DeviceOrder, dtype: torch.dtype | None = None
) -> Tensor:
    """Return each token's sum over slots of `y` times the weight of the slot, rounded before.

    That is to y's dtype, or to `dtype`. Shape: y [S, C], scales [T, K] fp32; returns [T, C].
    """
    flat = scales.flatten().unsqueeze(1)
    by_row = call(_Permuted, flat, order.slots, order.rows.flatten())
    out: Tensor = call(_SumSlots, (y.float() * by_row).to(dtype or y.dtype), order)
    return out


class _Permuted(torch.autograd.Function):
    """Rows by index, each of them once, so that the gradient is read by index too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: DeviceOrder) -> Tensor:
        ctx.order = order
        return sum_slots(y, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return rows_to_experts(grads[0], ctx.order), None
