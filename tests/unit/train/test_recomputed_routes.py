"""A mixture that is computed again for its backward pass goes to the experts of its first pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from spmd_rl.kernels.runtime.first_pass import both_passes, keep, kept_before
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.sigmoid_router import SigmoidRouter

ROUTERS = {"softmax": None, "sigmoid": SigmoidRouter(2, 1, 1.5)}


def mixture(router: str) -> MoeMlp:
    module = Moe(16, 8, 2, 12, sigmoid=ROUTERS[router]).module(0)
    assert isinstance(module, MoeMlp)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def gradients(router: str, *, turns: bool, **how: Any) -> dict[str, bytes]:
    """Gradients; with `turns`, the router would choose other experts when it is asked again."""
    module = mixture(router)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = checkpoint(module, x, use_reentrant=False, **how) if how else module(x)
    if turns:
        with torch.no_grad():
            module.gate.weight.copy_(module.gate.weight.flip(0))
    out.sum().backward()
    return {
        name: one.grad.numpy().tobytes()
        for name, one in module.named_parameters()
        if one.grad is not None
    }


def reached(found: dict[str, bytes]) -> set[str]:
    """The experts that have a gradient other than zero."""
    return {name for name, one in found.items() if "experts" in name and any(one)}


@pytest.mark.parametrize("router", ROUTERS)
def test_the_first_routes_are_taken_again(router: str) -> None:
    plain = gradients(router, turns=False)
    assert gradients(router, turns=False, context_fn=both_passes) == plain
    again = gradients(router, turns=True, context_fn=both_passes)
    assert reached(again) == reached(plain)


@pytest.mark.parametrize("router", ROUTERS)
def test_control_without_the_first_routes_others_are_taken(router: str) -> None:
    """Then experts have other numbers of rows, which torch refuses."""
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(router, turns=True, context_fn=lambda: (nullcontext(), nullcontext()))


def test_values_come_back_in_their_order_and_in_no_other_pass() -> None:
    first, second = both_passes()
    keep("lost: no pass is open")
    with first:
        assert kept_before() is None
        keep(1)
        keep(2)
    assert kept_before() is None
    with second:
        assert [kept_before(), kept_before()] == [1, 2]
    assert kept_before() is None
