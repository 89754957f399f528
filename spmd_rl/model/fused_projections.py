"""Fused projections: several linear layers of one input as a single matrix product.

Their weights must lie one after the other in memory. The bits are those of separate products, as
every output element has its own chain over K. Fusing is for engines on GPUs, where with few rows a
launch costs more than its arithmetic. A trainer shards weights one by one, so it does not fuse.
Their adapters are joined too: one product for all A, and one kernel for the rest. Where only some
projections have an adapter, each is added to its part of the product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spmd_rl.kernels import linear, silu_mul, silu_mul_linear
from spmd_rl.kernels.linear.adapters import add_adapters
from spmd_rl.kernels.linear.swiglu import is_one_kernel
from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.kernels.low_precision.products import coded_linear
from spmd_rl.model.linear import Linear


class JoinedAdapters(NamedTuple):
    """Adapters of P projections. Shape: down [P R, K], up [N, R]."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass
class FusedProjections:
    """Projections as one product. With `codes`, the weight is theirs.

    Shape: weight [N, K] and bias [N] of all of them together.
    """

    weight: Tensor
    bias: Tensor | None
    widths: list[int]
    adapters: JoinedAdapters | None = None
    codes: BlockCodes | None = None

    def product(self, x: Tensor) -> Sequence[Tensor]:
        """Return each projection of x [T, K], a view of the product's columns.

        What the joined adapters make of x is in it.
        """
        if self.codes is not None:
            whole = coded_linear(x, self.codes, self.bias)
        else:
            whole = linear(x, self.weight, self.bias)
        if self.adapters is not None:
            down, up, scale = self.adapters
            whole, _ = add_adapters(whole, x, down, up, scale, self.widths)
        return whole.split(self.widths, dim=-1)

    def fuses(self, x: Tensor) -> bool:
        """Return whether `gated` of x is a single kernel, whose product nobody can see."""
        is_plain = self.bias is None and self.codes is None
        return is_plain and is_one_kernel(x, self.weight)

    def gated(self, x: Tensor) -> Tensor:
        """Return `silu_mul` of two projections for which `fuses` says yes."""
        return silu_mul_linear(x, self.weight)


class FusableLayer(nn.Module, ABC):
    """A layer with projections of one input; `joined` has them as one product, where that is on."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: FusedProjections | None = None

    @abstractmethod
    def fusable(self) -> list[Linear]:
        """Return the projections that can be one product, in the order of its columns."""


def project(x: Tensor, joined: FusedProjections | None, *projections: Linear) -> Sequence[Tensor]:
    """Return each projection of x [T, K].

    Where they are fused and no gradient is wanted, these are views of one product's columns, or
    sums of these and what adapters compute.
    """
    if joined is None or torch.is_grad_enabled():
        return [one(x) for one in projections]
    products = joined.product(x)
    if joined.adapters is not None:
        return products
    return [one.with_adapter(x, part) for one, part in zip(projections, products, strict=True)]


def project_gated(x: Tensor, joined: FusedProjections | None, gate: Linear, up: Linear) -> Tensor:
    """Return `silu_mul` of two projections, from a single kernel where that can be."""
    is_adapted = gate.is_adapted or up.is_adapted
    if joined is None or is_adapted or torch.is_grad_enabled() or not joined.fuses(x):
        return silu_mul(*project(x, joined, gate, up))
    return joined.gated(x)


def lay_out(projections: Sequence[Linear]) -> None:
    """Move the projections' parameters next to each other in memory, in order, unless they are."""
    for parameters in [*_columns(projections), *_adapter_columns(projections)]:
        if _are_adjacent(parameters):
            continue
        # torch joins bytes on every device, but not codes
        dtype = parameters[0].dtype if parameters[0].itemsize > 1 else torch.uint8
        whole = torch.cat([parameter.data.view(dtype) for parameter in parameters])
        whole = whole.view(parameters[0].dtype)
        for parameter, part in zip(
            parameters, whole.split([len(p) for p in parameters]), strict=True
        ):
            parameter.data = part


def join(projections: Sequence[Linear]) -> FusedProjections | None:
    """Return the projections as one, or None if their parameters are not next to each other.

    Codes are joined if each block of rows is of one projection.
    """
    columns = _columns(projections)
    if not all(map(_are_adjacent, columns)):
        return None
    weight, *others = map(_whole, columns)
    codes = None
    if projections[0].has_codes:
        each = projections[0].codes
        height = each.format.block_rows
        if any(one.out_features % height for one in projections[:-1]):
            return None
        codes = BlockCodes(weight, others.pop(), each.num_columns, each.format)
    return FusedProjections(
        weight,
        others[0] if others else None,
        [len(one.weight) for one in projections],
        _joined_adapters(projections),
        codes,
    )


def _joined_adapters(projections: Sequence[Linear]) -> JoinedAdapters | None:
    """Return the adapters of all projections as one; None if they are not next to each other."""
    columns = _adapter_columns(projections)
    if not columns or not all(map(_are_adjacent, columns)):
        return None
    down, up = map(_whole, columns)
    return JoinedAdapters(down, up, projections[0].scale)


def _whole(parameters: Sequence[Tensor]) -> Tensor:
    """Return parameters that are next to each other as one tensor."""
    first, rows = parameters[0].data, sum(len(one) for one in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


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
    """Return all weights, then all biases and all scales of codes, if there are any."""
    columns: list[list[Tensor]] = [[one.weight for one in projections]]
    if projections[0].bias is not None:
        columns.append([one.bias for one in projections])
    if projections[0].has_codes:
        columns.append([one.codes.scales for one in projections])
    return columns


def _adapter_columns(projections: Sequence[Linear]) -> list[list[Tensor]]:
    """Return the weights of all A and of all B; nothing unless each projection has an adapter."""
    adapters = [one.adapter for one in projections]
    pairs = [pair for pair in adapters if pair is not None]
    return (
        [list(column) for column in zip(*pairs, strict=True)] if len(pairs) == len(adapters) else []
    )
