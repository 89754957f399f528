"""Projections of one input taken as one matrix product, where their weights lie one after the other
in memory.

The bits are those of separate products: every output element has its own chain over K. It is for
engines on GPUs, where few rows make a launch dearer than its arithmetic; a trainer's weights are
sharded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spmd_rl.kernels import linear, silu_mul, silu_mul_linear
from spmd_rl.kernels.linear.swiglu import is_one_kernel


@dataclass
class FusedProjections:
    """Shape: weight [N, K] and bias [N], of all projections together."""

    weight: Tensor
    bias: Tensor | None
    widths: list[int]

    def product(self, x: Tensor) -> Sequence[Tensor]:
        """Each projection of x [T, K], a view of the product's columns."""
        return linear(x, self.weight, self.bias).split(self.widths, dim=-1)

    def fuses(self, x: Tensor) -> bool:
        """Whether `gated` of x takes one kernel, so that no product is to be seen."""
        return self.bias is None and is_one_kernel(x, self.weight)

    def gated(self, x: Tensor) -> Tensor:
        """`silu_mul` of two projections without bias."""
        return silu_mul_linear(x, self.weight)


def project(
    x: Tensor, joined: FusedProjections | None, *projections: nn.Linear
) -> Sequence[Tensor]:
    """Each projection of x [T, K]: views of one product's columns, where they are joined and no
    gradient is wanted.
    """
    if joined is None or torch.is_grad_enabled():
        return [one(x) for one in projections]
    return joined.product(x)


def project_gated(
    x: Tensor, joined: FusedProjections | None, gate: nn.Linear, up: nn.Linear
) -> Tensor:
    """`silu_mul` of the two projections; one kernel where they are joined, fuse, and no gradient is
    wanted.
    """
    if joined is None or torch.is_grad_enabled() or not joined.fuses(x):
        return silu_mul(*project(x, joined, gate, up))
    return joined.gated(x)


def lay_out(projections: Sequence[nn.Linear]) -> None:
    """Move the parameters into one piece of memory, in order."""
    for parameters in _columns(projections):
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(
            parameters, whole.split([len(p) for p in parameters]), strict=True
        ):
            parameter.data = part


def join(projections: Sequence[nn.Linear]) -> FusedProjections | None:
    """The projections as one, or None where their memory has been pointed elsewhere since
    `lay_out`.
    """
    wholes = []
    for parameters in _columns(projections):
        ends = [p.data_ptr() + p.nbytes for p in parameters]
        if [p.data_ptr() for p in parameters[1:]] != ends[:-1] or not all(
            p.is_contiguous() for p in parameters
        ):
            return None
        rows = sum(len(p) for p in parameters)
        wholes.append(
            parameters[0].data.as_strided((rows, *parameters[0].shape[1:]), parameters[0].stride())
        )
    return FusedProjections(
        wholes[0], wholes[1] if len(wholes) > 1 else None, [len(one.weight) for one in projections]
    )


def _columns(projections: Sequence[nn.Linear]) -> list[list[Tensor]]:
    """All weights, then all biases if there are any."""
    columns: list[list[Tensor]] = [[one.weight for one in projections]]
    if projections[0].bias is not None:
        columns.append([one.bias for one in projections])
    return columns
