"""Linear layers and activation of the local layer spec, by the contract's ops (docs/numerics.md).

Megatron-core's own linear layers cut sums along tp and overlap their communication, so they stay
where there are several ranks along tp. One rank has no need of that, and gets the engine's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.kernels import linear, silu_mul
from spmd_rl.model.spec import ModelSpec


class LocalLinear(nn.Module):
    """A linear layer that no tp cuts, with the arguments of Megatron-core's own.

    Its weight may hold several projections: for each of `num_groups` groups, `widths` rows of each
    of them in turn.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        widths: Sequence[int] = (),
        num_groups: int = 1,
        **_: Any,
    ) -> None:
        super().__init__()
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **like))
        self.bias = nn.Parameter(torch.empty(output_size, **like)) if bias else None
        self.widths, self.num_groups = tuple(widths) or (output_size,), num_groups

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
        weights = self._parts(self.weight)
        biases = self._parts(self.bias) if self.bias is not None else [None] * len(weights)
        return self.join(
            [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        )

    def split(self, out: Tensor) -> list[Tensor]:
        """Return the columns of each projection. Shape: out [T, N]."""
        return [part.t() for part in self._parts(out.t())]

    def join(self, projections: Sequence[Tensor]) -> Tensor:
        """Return [T, N], of which `split` gives the projections."""
        columns = [one.unflatten(1, (self.num_groups, -1)) for one in projections]
        return torch.cat(columns, dim=2).flatten(1)

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Return each projection's rows."""
        grouped = whole.unflatten(0, (self.num_groups, -1))
        return [part.flatten(0, 1) for part in grouped.split(self.widths, dim=1)]


class LocalActivation(nn.Module):
    """SiLU of the gate's columns times the others, rounded once."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """Shape: gate_up [T, 1, 2 F]; returns [T, 1, F]."""
        gate, up = gate_up.flatten(0, 1).chunk(2, dim=-1)
        return silu_mul(gate, up).view(*gate_up.shape[:-1], -1)


def use_contract_ops(layer: Any, spec: ModelSpec, num_ranks: int) -> None:
    """Replace Megatron-core's ops in the spec of a dense layer. `num_ranks` are those along tp."""
    attention, mlp = layer.submodules.self_attention.submodules, _mlp_submodules(layer)
    mlp.activation_func = LocalActivation
    if num_ranks > 1:
        return
    size, num_groups = spec.head_dim, spec.num_kv_heads
    widths = (spec.num_heads // num_groups * size, size, size)
    attention.linear_qkv = _linear_of(widths, num_groups)
    mlp.linear_fc1 = _linear_of((spec.intermediate_size,) * 2)
    attention.linear_proj = mlp.linear_fc2 = LocalLinear


def _linear_of(widths: Sequence[int], num_groups: int = 1) -> type[LocalLinear]:
    """Return the class of a layer with these projections: every version builds a class."""

    class FusedLinear(LocalLinear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, widths=widths, num_groups=num_groups, **kwargs)

    return FusedLinear


def _mlp_submodules(layer: Any) -> Any:
    """Return the `MLPSubmodules` of a layer's spec, which later versions make by a function."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
