"""A mixture over 1, 2 and 4 gloo ranks: equal bits of outputs and of all gradients."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spmd_rl.kernels.moe import deep_ep_buffer, deep_ep_dispatcher
from spmd_rl.kernels.moe.deep_ep_dispatcher import DeepEpDispatcher
from spmd_rl.kernels.moe.dispatcher import EpDispatcher
from spmd_rl.kernels.runtime.first_pass import computed_again
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.mesh.world import World
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.split_experts import SplitExperts
from tests.dist.torchrun import on_ranks
from tests.dist.trainers import gathered, own_group
from tests.fakes import deep_ep

pytestmark = pytest.mark.dist

Report = list[dict[str, Any]]  # of each rank
HIDDEN, INNER, EXPERTS, CHOSEN = 36, 27, 8, 3
CASES = {  # tokens of each rank, and the first column of the router for some experts
    "even": ((40, 33, 48, 29), {}),
    "a rank with one token": ((40, 1, 17, 64), {}),
    "all to the last rank's experts": ((19, 24, 1, 30), {5: 50.0, 6: 50.0, 7: 50.0}),
}
DTYPES = (torch.float32, torch.bfloat16)
KINDS = {"torch": EpDispatcher, "deep_ep": DeepEpDispatcher}
SHARED = [(ep, kind) for ep in (2, 4) for kind in KINDS]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()


def mixture(dtype: torch.dtype, bias: dict[int, float]) -> MoeMlp:
    """The same on every rank. Experts have float32 weights, which are rounded in a pass."""
    module = Moe(HIDDEN, EXPERTS, CHOSEN, INNER, shared_size=10).module(0)
    assert isinstance(module, MoeMlp)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
        if not name.startswith("experts."):
            parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        for expert, amount in bias.items():
            module.gate.weight[expert, 0] = amount
    return module


def tokens_of(rank: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of a rank, and the gradient of what the mixture gives them."""
    generator = torch.Generator().manual_seed(10 + rank)
    x, pull = torch.randn(2, number, HIDDEN, generator=generator).to(dtype)
    x[:, 0] = x[:, 0].abs() + 1
    return x, pull


def results(module: MoeMlp, ep: int, x: Tensor, pull: Tensor, rank: int) -> dict[str, Tensor]:
    """Outputs, and gradients: those of experts are summed over the ranks as FSDP does."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(pull)
    found = {"out": out, "x": x.grad}
    with torch.no_grad():
        found["out without gradients"] = module(x)
    for name, parameter in module.named_parameters():
        if not name.startswith("experts."):
            found[name] = parameter.grad
    own = {n: p.grad.float() for n, p in module.named_parameters() if n.startswith("experts.")}
    found |= {name: sum_neighbours(parts) for name, parts in over_copies(own, ep, rank)}
    if ep == 1:
        ordered = (
            (f"rank by rank, {name}", sum(parts[1:], parts[0]))
            for name, parts in over_copies(own, ep, rank)
        )
        found |= dict(ordered)
    return found | recomputed(module, x, pull)


def recomputed(module: MoeMlp, x: Tensor, pull: Tensor) -> dict[str, Tensor]:
    """The same where the backward pass computes all again, but for the routes."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = computed_again(module)(x)
    out.backward(pull)
    return {"out again": out, "x again": x.grad, "gate.weight again": module.gate.weight.grad}


def over_copies(own: dict[str, Tensor], ep: int, rank: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the gradients that each copy of an expert has, where this rank has one."""
    every = gathered(own)
    for name in own:
        yield name, [of_rank[name].clone() for of_rank in every[rank % ep :: ep]]


def partial_sums(module: MoeMlp, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A control: each of two ranks sums and rounds what its experts give, and these are added."""
    whole = EpDispatcher(group, EXPERTS)
    routes = module._route(x @ module.gate.weight.T)
    total = torch.zeros_like(x)
    for first in range(0, EXPERTS, whole.num_own):
        is_own = (routes.ids >= first) & (routes.ids < first + whole.num_own)
        weights = torch.where(is_own, routes.weights, 0.0)
        total += module.one_by_one(x, routes._replace(weights=weights))
    return total


def exact(module: MoeMlp, x: Tensor) -> Tensor:
    return module.one_by_one(x, module._route(x @ module.gate.weight.T))


def on_rank(world: World) -> dict[str, Any]:
    """A mixture gives its outputs and gradients where 1, 2 and 4 ranks share its experts, with each
    dispatcher. DeepEP is a fake. The report has the SHA-256 of each, and of two controls: sums of
    slots that each rank rounds, and gradients that are summed rank by rank.
    """
    use_fake_deep_ep()
    rank = world.rank
    groups = {ep: own_group(ep, world) for ep in (2, 4)}
    report: dict[str, Any] = {}
    for case, (numbers, bias) in CASES.items():
        for dtype in DTYPES:
            x, pull = tokens_of(rank, numbers[rank], dtype)
            for ep, kind in [(1, "torch"), *SHARED]:
                module = mixture(dtype, bias)
                if ep > 1:
                    module.split(groups[ep], KINDS[kind](groups[ep], EXPERTS))
                    assert isinstance(module.experts, SplitExperts)
                    assert len(module.experts) == EXPERTS // ep
                    deep_ep.GROUPS[:] = [groups[ep]]
                else:
                    module.experts.to(dtype)
                found = results(module, ep, x, pull, rank)
                name = f"{case}, {dtype}, ep {ep}, {kind}"
                report[name] = {k: digest(v) for k, v in found.items()}
                # a pass with gradients: there, back, and both again
                assert deep_ep.calls[:4] == ["first", "first", "again", "again"] * (kind != "torch")
                # then a pass without, and one whose backward pass computes it again
                assert deep_ep.calls[4:].count("first") == 4 * (kind != "torch")
                deep_ep.calls.clear()
    module = mixture(torch.float32, {})
    module.shared_experts = None
    x, _ = tokens_of(rank, 64, torch.float32)
    with torch.no_grad():
        control = {"partial": partial_sums(copy.deepcopy(module), x, groups[2])}
        control["exact"] = exact(module, x)
    report["control"] = {name: digest(one) for name, one in control.items()}
    report["refused"] = {"sentence": refused(groups[4])}
    return report


def use_fake_deep_ep() -> None:
    sys.modules["deep_ep"] = deep_ep
    deep_ep_buffer.check_deep_ep = deep_ep_dispatcher.check_deep_ep = lambda num_ranks: None
    deep_ep_buffer.ALIGN_BYTES = 1
    Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment]


def refused(group: dist.ProcessGroup) -> str:
    try:
        EpDispatcher(group, 6)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture(scope="module")
def report() -> Report:
    return on_ranks(on_rank, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "dtype", "ep"), list(product(CASES, DTYPES, (2, 4))))
def test_bits_do_not_depend_on_how_many_ranks_share_experts(
    case: str, dtype: torch.dtype, ep: int, kind: str, report: Report
) -> None:
    compared = set()
    for of_rank in report:
        alone = of_rank[f"{case}, {dtype}, ep 1, torch"]
        shared = of_rank[f"{case}, {dtype}, ep {ep}, {kind}"]
        own = [name for name in shared if name.startswith("experts.")]
        assert len(own) == 3 * EXPERTS // ep
        assert shared == {name: alone[name] for name in shared}
        for name in ("out", "x", "gate.weight"):
            assert shared[f"{name} again"] == shared[name]
        compared |= set(own)
    assert len(compared) == 3 * EXPERTS
    assert {"out", "out without gradients", "x", "gate.weight"} < set(shared)


def test_sums_that_each_rank_rounds_have_other_bits(report: Report) -> None:
    for of_rank in report:
        assert of_rank["control"]["partial"] != of_rank["control"]["exact"]


def test_gradients_that_are_summed_rank_by_rank_have_other_bits(report: Report) -> None:
    found = report[0]["even, torch.float32, ep 1, torch"]
    names = [name for name in found if name.startswith("experts.")]
    assert any(found[name] != found[f"rank by rank, {name}"] for name in names)


def test_experts_that_ranks_cannot_share_evenly_are_refused(report: Report) -> None:
    for of_rank in report:
        assert of_rank["refused"]["sentence"] == "4 ranks cannot share 6 experts evenly"


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 99))
def test_a_sum_of_neighbours_does_not_depend_on_groups(log2: int, inner: int, seed: int) -> None:
    parts = torch.randn(1 << log2, 50, generator=torch.Generator().manual_seed(seed))
    parts *= torch.logspace(-3, 3, len(parts)).unsqueeze(1)
    whole = sum_neighbours(parts.clone().unbind())
    groups = parts.clone().split(1 << min(inner, log2))
    assert torch.equal(sum_neighbours([sum_neighbours(one.unbind()) for one in groups]), whole)
    torch.testing.assert_close(whole, parts.sum(0), rtol=1e-5, atol=1e-4)


def test_three_parts_are_added_in_their_order() -> None:
    first, second, third = torch.randn(3, 50)
    expected = (first + second) + third
    assert torch.equal(sum_neighbours([first, second, third]), expected)
