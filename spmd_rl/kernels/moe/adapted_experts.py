"""Experts with adapters or biases on NVIDIA GPUs, all at once, rounded as single ones are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.kernels.moe.expert_addresses import KeptAddresses
from spmd_rl.kernels.moe.experts import (
    Weights,
    add_biases,
    grouped_linear,
    order_slots,
    scaled_sum,
)
from spmd_rl.kernels.moe.order_triton import DeviceOrder
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.rowwise.activation import clamped_mul, silu_mul
from spmd_rl.kernels.runtime.padding import dense


class Projection(NamedTuple):
    """One projection of all experts, its adapters' A and B, and biases, or None without them.

    Shape: weights [N, C] each; a [R, C] and b [N, R] each; biases [N] each.
    """

    name: str
    weights: Weights
    a: Weights | None
    b: Weights | None
    scale: float
    biases: Sequence[Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        return self.a is None and self.biases is None


class AdaptedExperts(NamedTuple):
    """The projections of experts of which some have adapters, or all biases.

    `limit` is that of `mlp_module.GatedMlp`, 0 for none.
    """

    gate: Projection
    up: Projection
    down: Projection
    limit: float = 0.0


def adapted_output(
    x: Tensor, routes: ExpertRoutes, experts: AdaptedExperts, kept: KeptAddresses
) -> Tensor:
    """Return the sum of what each token's experts give it. Shape: x [T, C] bf16; returns [T, C]."""
    x, order = dense(x), order_slots(routes, len(experts.gate.weights))
    gate = _project(x, experts.gate, order, kept, gathers=True)
    up = _project(x, experts.up, order, kept, gathers=True)
    hidden = clamped_mul(gate, up, experts.limit) if experts.limit else silu_mul(gate, up)
    down = _project(hidden, experts.down, order, kept, gathers=False, dtype=torch.float32)
    return scaled_sum(down, routes.weights, order, x.dtype)


def _project(
    x: Tensor,
    one: Projection,
    order: DeviceOrder,
    kept: KeptAddresses,
    *,
    gathers: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the projection, plus B (scale * A x): rounded as in `linear.adapters.add_adapters`.

    With biases, it is rounded once to `dtype`, or to that of x.
    """
    given = x, one.weights, order, kept, one.name
    if one.biases is not None:
        product = grouped_linear(*given, gathers=gathers, dtype=torch.float32)
        return add_biases(product, one.biases, order, dtype or x.dtype)
    product = grouped_linear(*given, gathers=gathers)
    if one.a is None or one.b is None:
        return product
    low = grouped_linear(x, one.a, order, kept, f"{one.name}, A", gathers=gathers)
    added = grouped_linear(low * one.scale, one.b, order, kept, f"{one.name}, B", gathers=False)
    return product + added
