"""Gradients of experts on a GPU: against float64, beside the loop over experts, and repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from spmd_rl.model.layers.mlp import PROJECTIONS
from spmd_rl.model.layers.moe_module import MoeMlp
from tests.gpu.kernels.mixtures import SIZES, mixture, one_by_one, routes_of

pytest.importorskip("triton")

CASES = [
    ("tiny", 50),
    ("uneven", 129),
    ("tiny", 1),
    ("30B-A3B", 700),
    ("GLM-4.5-Air", 300),
    ("groups", 90),
]
# of a gradient's norm: some roundings to bf16 on the way to it, each of 2**-9 at most
TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def _frees_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def in_float64(module: MoeMlp, x: Tensor, ids: Tensor) -> Tensor:
    """Return the layer's output with these experts, of leaves in float64."""
    logits = x @ module.gate.weight.double().t()
    scores = logits.softmax(-1) if module.sigmoid is None else logits.sigmoid()
    weights = scores.gather(1, ids)
    if module.normalizes_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    if module.sigmoid is not None:
        weights = weights * module.sigmoid.scale
    out = torch.zeros_like(x)
    for number, expert in enumerate(module.experts):
        token, slot = (ids == number).nonzero(as_tuple=True)
        y = mlp(expert, x[token])
        out = out.index_add(0, token, y * weights[token, slot].unsqueeze(1))
    return out if module.shared_experts is None else out + mlp(module.shared_experts, x)


def mlp(module: nn.Module, x: Tensor) -> Tensor:
    gate, up, down = (getattr(module, name).weight.double() for name in PROJECTIONS)
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def gradients(module: MoeMlp, out: Tensor, x: Tensor, pull: Tensor) -> dict[str, Tensor]:
    named = dict(module.named_parameters()) | {"x": x}
    wanted = {name: one for name, one in named.items() if one.requires_grad}
    found = torch.autograd.grad(
        (out.double() * pull).sum(), list(wanted.values()), allow_unused=True
    )
    pairs = zip(wanted.items(), found, strict=True)
    return {name: torch.zeros_like(one) if grad is None else grad for (name, one), grad in pairs}


def drawn(name: str, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(count)
    x, pull = torch.randn(2, count, SIZES[name].hidden, device="cuda", generator=generator)
    return x.bfloat16().requires_grad_(), pull.bfloat16().double()


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(("name", "count"), CASES)
def test_gradients_against_float64(name: str, count: int, normalizes: bool) -> None:
    module, (x, pull) = mixture(name, normalizes=normalizes), drawn(name, count)
    ids = routes_of(module, x).ids
    found = gradients(module, module(x), x, pull)
    wide = x.detach().double().requires_grad_()
    expected = gradients(module, in_float64(module, wide, ids), wide, pull)
    empty = set(range(len(module.experts))) - set(ids.flatten().tolist())
    for key, wanted in expected.items():
        if key.startswith("experts.") and int(key.split(".")[1]) in empty:
            assert not found[key].any(), key
            continue
        error = (found[key].double() - wanted).norm() / wanted.norm()
        # The router's gradient is a difference of products that are larger.
        assert error < (10 if key == "gate.weight" else 1) * TOLERANCE, (key, error)


@pytest.mark.parametrize("rank", [0, 16])
def test_gradients_are_as_near_as_those_of_the_loop(rank: int) -> None:
    module, (x, pull) = mixture("30B-A3B", rank=rank), drawn("30B-A3B", 700)
    found = gradients(module, module(x), x, pull)
    other = gradients(module, one_by_one(module, x), x, pull)
    for key, wanted in other.items():
        difference = (found[key].double() - wanted.double()).norm()
        limit = (10 if key == "gate.weight" else 2) * TOLERANCE
        assert difference <= limit * wanted.double().norm(), key


def test_a_frozen_router_and_frozen_experts_have_no_gradients() -> None:
    module, (x, pull) = mixture("tiny"), drawn("tiny", 40)
    every = gradients(module, module(x), x, pull)
    for frozen in ("gate.weight", "experts.", "down_proj", "gate_proj"):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(frozen not in name)
        some = gradients(module, module(x), x, pull)
        assert some.keys() == {name for name in every if frozen not in name}
        for name, one in some.items():
            assert torch.equal(one, every[name]), name


@pytest.mark.parametrize("name", ["tiny", "30B-A3B"])
def test_gradients_repeat_bit_for_bit(name: str) -> None:
    module, (x, pull) = mixture(name), drawn(name, 600)
    first, second = (gradients(module, module(x), x, pull) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_every_expert_gets_a_gradient_of_its_own() -> None:
    """Ranks of a data-parallel trainer reduce the same gradients, whoever has which tokens."""
    module, (x, pull) = mixture("tiny"), drawn("tiny", 1)
    (module(x).double() * pull).sum().backward()
    grads = [one.grad for one in module.parameters()]
    assert all(one is not None and one.is_contiguous() for one in grads)


def test_control_a_lost_weight_is_seen() -> None:
    """The negative control: a gradient without the weights of slots is far from float64's."""
    module, (x, pull) = mixture("tiny"), drawn("tiny", 50)
    ids = routes_of(module, x).ids
    wide = x.detach().double().requires_grad_()
    expected = gradients(module, in_float64(module, wide, ids), wide, pull)["x"]
    module.normalizes_weights = False
    found = gradients(module, module(x), x, pull)["x"]
    assert (found.double() - expected).norm() / expected.norm() > 10 * TOLERANCE
