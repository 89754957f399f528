"""Products of a Qwen3 layer, fused as in an engine, separate as in a trainer, and by row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from benchmarks.shapes import QWEN3
from spmd_rl.kernels import linear, linear_fp32
from spmd_rl.model.fused_projections import FusedProjections, join, lay_out, project, project_gated
from spmd_rl.model.linear import Linear
from tests.gpu.kernels.products import layer, split_in_two

PACK = 16384  # rows: tokens of a trainer's micro-batch
NUM_ROWS = (1, 8, 16, 33, 64, 128, 200, 1000, PACK)
EVERY = 331  # rows from one that is compared to the next
# what has its own weight in a trainer, and which of a layer's products it belongs to
APART = {
    "q": ("qkv", 0),
    "k, v": ("qkv", 1),
    "o": ("o", 0),
    "gate": ("gate_up", 0),
    "up": ("gate_up", 1),
}
APART |= {"down": ("down", 0)}


def linears(weights: Sequence[Tensor]) -> list[Linear]:
    """Return a module for each weight, in memory of its own."""
    made = []
    for weight in weights:
        with torch.device("meta"):
            one = Linear(weight.shape[1], len(weight), bias=False)
        one.weight = nn.Parameter(weight.clone(), requires_grad=False)
        made.append(one)
    return made


def joined_and_apart(name: str, what: str, rows) -> tuple[FusedProjections, list[Linear]]:
    """Return the same weights as an engine and as a trainer has them."""
    widths, k = layer(name)[what]
    weights = rows("normal", sum(widths), k).split(widths)
    engines = linears(weights)
    lay_out(engines)
    joined = join(engines)
    assert joined is not None
    return joined, linears(weights)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("what", ["qkv", "gate_up"])
@pytest.mark.parametrize("name", QWEN3)
def test_joined_weights_give_the_bits_of_their_parts(
    name: str, what: str, num_rows: int, rows, unequal
) -> None:
    """With gradients each part is a product of its own. Accumulators are compared too."""
    joined, apart = joined_and_apart(name, what, rows)
    x = rows("normal", num_rows, joined.weight.shape[1])
    with torch.no_grad():
        together = project(x, joined, *apart)
    for one, part in zip(project(x, None, *apart), together, strict=True):
        assert unequal(one, part) == 0
    accumulators = linear_fp32(x, joined.weight).split(joined.widths, dim=1)
    for module, part in zip(apart, accumulators, strict=True):
        assert unequal(linear_fp32(x, module.weight), part) == 0
    if what == "gate_up":
        with torch.no_grad():
            gated = project_gated(x, joined, *apart)
        assert unequal(project_gated(x, None, *apart), gated) == 0


@pytest.mark.parametrize("op", [linear, linear_fp32])
@pytest.mark.parametrize("what", APART)
@pytest.mark.parametrize("name", QWEN3)
def test_rows_one_by_one_are_those_of_a_pack(name: str, what: str, op, rows, unequal) -> None:
    product, index = APART[what]
    widths, k = layer(name)[product]
    weight, x = rows("normal", sum(widths), k).split(widths)[index], rows("normal", PACK, k)
    some = x[::EVERY]
    alone = torch.cat([op(row, weight) for row in some.split(1)])
    assert unequal(op(x, weight)[::EVERY], alone) == 0
    assert unequal(op(some, weight), alone) == 0


def test_control_parts_in_two_chains_fail(rows, unequal) -> None:
    joined, apart = joined_and_apart("0.6B", "qkv", rows)
    x = rows("normal", 64, joined.weight.shape[1])
    for one, part in zip(
        apart, split_in_two(x, joined.weight).split(joined.widths, dim=1), strict=True
    ):
        assert unequal(linear_fp32(x, one.weight), part) > 0.1 * part.numel()
