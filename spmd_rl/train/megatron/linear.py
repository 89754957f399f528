"""Linear layers and activation of the local layer spec, by the contract's ops (docs/numerics.md).

Their sums have the engine's bits, also where ranks along tp share a layer (tensor_ranks.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.kernels import silu_mul
from spmd_rl.train.megatron.tensor_ranks import TensorRanks


class LocalLinear(nn.Module, ABC):
    """A linear layer of which this rank has a part, with the arguments of Megatron-core's own.

    Its weight may hold several projections, one after the other, of `widths` rows each.
    """

    def __init__(self, shape: tuple[int, int], config: Any, ranks: TensorRanks, bias: bool) -> None:
        super().__init__()
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(*shape, **like))
        self.bias = nn.Parameter(torch.empty(shape[0], **like)) if bias else None
        self.ranks = ranks
        self.widths: Sequence[int] = shape[:1]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product, and no bias that is still to add. Shape: x [T, 1, K]; [T, 1, N]."""
        return self.product(x.flatten(0, 1)).unsqueeze(1), None

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Shape: x [T, K]; returns [T, N]. Rows are those that `TensorRanks` says."""

    def split(self, out: Tensor) -> Sequence[Tensor]:
        """Return the columns of each projection. Shape: out [T, N]."""
        return out.split(list(self.widths), dim=-1)

    def join(self, projections: Sequence[Tensor]) -> Tensor:
        """Return [T, N], of which `split` gives the projections."""
        return torch.cat(list(projections), dim=-1)


class LocalProjections(LocalLinear):
    """Projections of which each rank has as many rows. `widths` are those of all ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        ranks: TensorRanks,
        widths: Sequence[int] = (),
        **_: Any,
    ) -> None:
        super().__init__((output_size // ranks.count, input_size), config, ranks, bias)
        self.widths = [width // ranks.count for width in widths or (output_size,)]

    def product(self, x: Tensor) -> Tensor:
        return self.ranks.column_product(x, self.weight, self.bias, self.widths)


class LocalGateUp(LocalProjections):
    """The projections of the gate and of what it gates, of equal widths."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, widths=(output_size // 2,) * 2, **kwargs)


class LocalOutput(LocalLinear):
    """A product that is added to the residual stream, of whose inputs each rank has as many."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, ranks: TensorRanks, **_: Any
    ) -> None:
        super().__init__((output_size, input_size // ranks.count), config, ranks, bias=False)

    def product(self, x: Tensor) -> Tensor:
        return self.ranks.row_product(x, self.weight)


class LocalActivation(nn.Module):
    """SiLU of the gate's columns times the others, rounded once."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """Shape: gate_up [T, 1, 2 F]; returns [T, 1, F]."""
        gate, up = gate_up.flatten(0, 1).chunk(2, dim=-1)
        return silu_mul(gate, up).view(*gate_up.shape[:-1], -1)
