"""Experts with low-rank adapters on NVIDIA GPUs, all at once, with the roundings of single ones."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from spmd_rl.kernels.moe.expert_addresses import KeptAddresses
from spmd_rl.kernels.moe.experts import Weights, grouped_linear, order_slots, scaled_sum
from spmd_rl.kernels.moe.order_triton import DeviceOrder
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.rowwise.activation import silu_mul
from spmd_rl.kernels.runtime.padding import dense


class Projection(NamedTuple):
    """One projection of all experts, and its adapters' A and B, or None without adapters.

    Shape: weights [N, C] each; a [R, C] and b [N, R] each.
    """

    name: str
    weights: Weights
    a: Weights | None
    b: Weights | None
    scale: float


class AdaptedExperts(NamedTuple):
    """The projections of experts of which some have adapters."""

    gate: Projection
    up: Projection
    down: Projection


def adapted_output(
    x: Tensor, routes: ExpertRoutes, experts: AdaptedExperts, kept: KeptAddresses
) -> Tensor:
    """Return the sum of what each token's experts give it. Shape: x [T, C] bf16; returns [T, C]."""
    x, order = dense(x), order_slots(routes, len(experts.gate.weights))
    gate = _project(x, experts.gate, order, kept, gathers=True)
    up = _project(x, experts.up, order, kept, gathers=True)
    down = _project(silu_mul(gate, up), experts.down, order, kept, gathers=False)
    return scaled_sum(down, routes.weights, order)


def _project(
    x: Tensor, one: Projection, order: DeviceOrder, kept: KeptAddresses, *, gathers: bool
) -> Tensor:
    """Return the projection, plus B (scale * A x): rounded as in `linear.adapters.add_adapters`."""
    product = grouped_linear(x, one.weights, order, kept, one.name, gathers=gathers)
    if one.a is None or one.b is None:
        return product
    low = grouped_linear(x, one.a, order, kept, f"{one.name}, A", gathers=gathers)
    added = grouped_linear(low * one.scale, one.b, order, kept, f"{one.name}, B", gathers=False)
    return product + added
