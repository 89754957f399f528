"""Fixed parameters: float32 in any model, and left out of what is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.fixed_parameters import HoldsFixed
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.cost.parts import num_trained_parameters
from tests.specs import dense_spec

VALUES = torch.tensor([1 / 3, -7.000001, 1e-30])


class Holder(HoldsFixed):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.fix("shift", 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_leave_its_bits(dtype: torch.dtype) -> None:
    holder = Holder()
    holder.shift.data = VALUES.clone()
    nn.Sequential(holder).to(dtype)
    assert holder.weight.dtype == dtype
    assert holder.shift.dtype == torch.float32
    assert torch.equal(holder.shift, VALUES)
    assert not holder.shift.requires_grad


def test_memory_comes_in_float32() -> None:
    with torch.device("meta"):
        holder = Holder().to(torch.bfloat16)
    assert holder.shift.dtype == torch.float32
    holder.to_empty(device="cpu")
    assert (holder.weight.dtype, holder.shift.dtype) == (torch.bfloat16, torch.float32)
    memory: dict[Tensor, Tensor] = {one: torch.zeros_like(one) for one in holder.parameters()}
    holder._apply(memory.__getitem__)
    assert holder.shift.data_ptr() == memory.popitem()[1].data_ptr()


class ShiftedMlp(Mlp):
    def parameters(self) -> list[TensorSpec]:
        return [*super().parameters(), TensorSpec("mlp.shift", (7,), is_fixed=True)]


def test_it_is_counted_but_not_trained() -> None:
    plain = dense_spec(
        "qwen3", vocab=20, hidden=8, inner=12, layers=3, heads=(2, 1, 4), positions=32
    )
    block = plain.blocks[0]
    shifted = BlockSpec(8, block.mixer, ShiftedMlp(8, 12))
    spec = replace(plain, blocks=(block, shifted, shifted))
    names = {"model.layers.1.mlp.shift", "model.layers.2.mlp.shift"}
    assert spec.fixed_names() == names
    assert spec.num_parameters == plain.num_parameters + 2 * 7
    assert spec.parameter_shapes().keys() - spec.trainable_shapes().keys() == names
    assert num_trained_parameters(spec, TrainerConfig()) == plain.num_parameters
