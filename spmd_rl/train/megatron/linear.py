"""Linear layers and activation of the local layer spec, by the contract's ops (docs/numerics.md).

Megatron-core's own linear layers cut sums along tp and overlap their communication, so they stay
where there are several ranks along tp. One rank has no need of that, and gets the engine's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.kernels import linear, silu_mul


class LocalLinear(nn.Module):
    """A linear layer that no tp cuts, with the arguments of Megatron-core's own.

    Its weight may hold several projections, one after the other, of `widths` rows each.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        widths: Sequence[int] = (),
        **_: Any,
    ) -> None:
        super().__init__()
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **like))
        self.bias = nn.Parameter(torch.empty(output_size, **like)) if bias else None
        self.widths = tuple(widths) or (output_size,)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product, and no bias that is still to add. Shape: x [T, 1, K]; [T, 1, N]."""
        rows = x.flatten(0, 1)
        if x.is_cuda or len(self.widths) == 1:
            out = linear(rows, self.weight, self.bias)
        else:
            out = self._products(rows)
        return out.view(*x.shape[:-1], -1), None

    def _products(self, x: Tensor) -> Tensor:
        """Return the projections as products of their own.

        On a CPU their bits may depend on the number of columns.
        """
        weights = self.weight.split(self.widths)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(self.widths)
        return self.join(
            [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        )

    def split(self, out: Tensor) -> Sequence[Tensor]:
        """Return the columns of each projection. Shape: out [T, N]."""
        return out.split(self.widths, dim=-1)

    def join(self, projections: Sequence[Tensor]) -> Tensor:
        """Return [T, N], of which `split` gives the projections."""
        return torch.cat(list(projections), dim=-1)


class LocalGateUp(LocalLinear):
    """The projections of the gate and of what it gates, of equal widths."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, widths=(output_size // 2,) * 2, **kwargs)


class LocalActivation(nn.Module):
    """SiLU of the gate's columns times the others, rounded once."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """Shape: gate_up [T, 1, 2 F]; returns [T, 1, F]."""
        gate, up = gate_up.flatten(0, 1).chunk(2, dim=-1)
        return silu_mul(gate, up).view(*gate_up.shape[:-1], -1)
