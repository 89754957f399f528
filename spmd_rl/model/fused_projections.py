"""Fused projections: several linear layers of one input as a single matrix product.

Their weights must lie one after the other in memory. The bits are those of separate products, as
every output element has its own chain over K. Fusing is for engines on GPUs, where with few rows a
launch costs more than its arithmetic. A trainer shards weights one by one, so it does not fuse.
Adapters stay separate: each is added to its part of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.kernels import linear, silu_mul, silu_mul_linear
from spmd_rl.kernels.linear.swiglu import is_one_kernel
from spmd_rl.model.linear import Linear


@dataclass
class FusedProjections:
    """Projections as one product. Shape: weight [N, K] and bias [N] of all of them together."""

    weight: Tensor
    bias: Tensor | None
    widths: list[int]

    def product(self, x: Tensor) -> Sequence[Tensor]:
        """Return each projection of x [T, K], a view of the product's columns."""
        return linear(x, self.weight, self.bias).split(self.widths, dim=-1)

    def fuses(self, x: Tensor) -> bool:
        """Return whether `gated` of x is a single kernel, whose product nobody can see."""
        return self.bias is None and is_one_kernel(x, self.weight)

    def gated(self, x: Tensor) -> Tensor:
        """Return `silu_mul` of two projections without bias."""
        return silu_mul_linear(x, self.weight)


def project(x: Tensor, joined: FusedProjections | None, *projections: Linear) -> Sequence[Tensor]:
    """Return each projection of x [T, K].

    Where they are fused and no gradient is wanted, these are views of one product's columns, or
    sums of these and what adapters compute.
    """
    if joined is None or torch.is_grad_enabled():
        return [one(x) for one in projections]
    parts = zip(projections, joined.product(x), strict=True)
    return [one.with_adapter(x, part) for one, part in parts]


def project_gated(x: Tensor, joined: FusedProjections | None, gate: Linear, up: Linear) -> Tensor:
    """Return `silu_mul` of two projections, from a single kernel where that can be."""
    is_adapted = gate.is_adapted or up.is_adapted
    if joined is None or is_adapted or torch.is_grad_enabled() or not joined.fuses(x):
        return silu_mul(*project(x, joined, gate, up))
    return joined.gated(x)


def lay_out(projections: Sequence[Linear]) -> None:
    """Move the projections' parameters next to each other in memory, in order, unless they are."""
    for parameters in _columns(projections):
        if _are_adjacent(parameters):
            continue
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(
            parameters, whole.split([len(p) for p in parameters]), strict=True
        ):
            parameter.data = part


def join(projections: Sequence[Linear]) -> FusedProjections | None:
    """Return the projections as one, or None if their parameters are not next to each other."""
    wholes = []
    for parameters in _columns(projections):
        if not _are_adjacent(parameters):
            return None
        first, rows = parameters[0], sum(len(p) for p in parameters)
        wholes.append(first.data.as_strided((rows, *first.shape[1:]), first.stride()))
    return FusedProjections(
        wholes[0], wholes[1] if len(wholes) > 1 else None, [len(one.weight) for one in projections]
    )


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Return whether each parameter is contiguous and begins where the one before it ends.

    Parameters of different storages may lie so by chance, but no tensor can span them.
    """
    if parameters[0].is_meta:  # without memory
        return False
    if len({p.untyped_storage().data_ptr() for p in parameters}) > 1:
        return False
    ends = [p.data_ptr() + p.nbytes for p in parameters]
    begins = [p.data_ptr() for p in parameters]
    return begins[1:] == ends[:-1] and all(p.is_contiguous() for p in parameters)


def _columns(projections: Sequence[Linear]) -> list[list[Tensor]]:
    """Return all weights, then all biases if there are any."""
    columns: list[list[Tensor]] = [[one.weight for one in projections]]
    if projections[0].bias is not None:
        columns.append([one.bias for one in projections])
    return columns
