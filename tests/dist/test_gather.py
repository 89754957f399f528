"""Experts that 2 and 4 gloo ranks share, each of which gets the rows of all: equal bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.moe.expert_gather import OwnExperts, TorchGather
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.mesh.world import World
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.split_experts import SplitExperts, gathering
from tests.dist.test_dispatcher import (
    CHOSEN,
    DTYPES,
    EXPERTS,
    HIDDEN,
    digest,
    mixture,
    tokens_of,
)
from tests.dist.torchrun import on_ranks
from tests.dist.trainers import own_group

pytestmark = pytest.mark.dist

ROWS = 64  # of a rank, padding included
CASES = {  # rows of each rank that are used, and the first column of the router for some experts
    "even": ((40, 33, 48, 29), {}),
    "ranks with one row and none": ((64, 1, 0, 5), {}),
    "all to the last rank's experts": ((19, 24, 1, 30), {5: 50.0, 6: 50.0, 7: 50.0}),
    "padding alone": ((0, 0, 0, 0), {}),
}


class CountedGather(TorchGather):
    """A gather that knows how many passes took it."""

    passes = 0

    def run(self, x: Tensor, routes: ExpertRoutes, experts: OwnExperts) -> Tensor:
        self.passes += 1
        return super().run(x, routes, experts)


def routes_of(module: MoeMlp, x: Tensor, used: int) -> ExpertRoutes:
    """The routes of the used rows; those behind them go to no expert."""
    routes = module._route((x @ module.gate.weight.T).float())
    routes.ids[used:] = EXPERTS
    return routes


def alone(module: MoeMlp, x: Tensor, routes: ExpertRoutes) -> Tensor:
    """What one rank gives that has all experts."""
    return module.one_by_one(x, routes) if len(x) else x


@torch.no_grad()
def sums(dtype: torch.dtype, used: int, bias: dict[int, float], world: World, groups: Any) -> Any:
    """The SHA-256 of the used rows, and of one rank that has all experts."""
    x = torch.zeros(ROWS, HIDDEN, dtype=dtype)
    x[:used] = tokens_of(world.rank, max(used, 1), dtype)[0][:used]
    module = mixture(dtype, bias)
    module.shared_experts = None
    module.experts.to(dtype)
    routes = routes_of(module, x, used)
    of_used = ExpertRoutes(routes.ids[:used], routes.weights[:used])
    found = {"alone": digest(alone(module, x[:used], of_used))}
    for ep, group in groups.items():
        shared = mixture(dtype, bias)
        shared.split(group)
        experts = shared.experts
        assert isinstance(experts, SplitExperts)
        gather = CountedGather(group, EXPERTS)
        with gathering(shared, gather):
            given = experts(x, routes)
        assert gather.passes == 1
        assert not given[used:].any()
        found[f"ep {ep}"] = digest(given[:used])
        assert experts.gather is None, "the next pass is no gather's"
    return found


def on_rank(world: World) -> dict[str, Any]:
    """A mixture's experts give their sums where ranks gather the rows of all, among padding."""
    groups = {ep: own_group(ep, world) for ep in (2, 4)}
    report = {
        f"{case}, {dtype}": sums(dtype, numbers[world.rank], bias, world, groups)
        for case, (numbers, bias) in CASES.items()
        for dtype in DTYPES
    }
    none = torch.zeros(0, HIDDEN), ExpertRoutes(torch.zeros(0, CHOSEN).long(), torch.zeros(0, 3))
    module = mixture(torch.float32, {})
    module.split(groups[4])
    assert isinstance(module.experts, SplitExperts)
    with torch.no_grad(), gathering(module, TorchGather(groups[4], EXPERTS)):
        report["no rows"] = {"shape": list(module.experts(*none).shape)}
    return report


@pytest.fixture(scope="module")
def report() -> list[dict[str, Any]]:
    return on_ranks(on_rank, 4)


@pytest.mark.parametrize(("case", "dtype", "ep"), list(product(CASES, DTYPES, (2, 4))))
def test_gathered_rows_have_the_bits_of_one_rank(
    case: str, dtype: torch.dtype, ep: int, report: list[dict[str, Any]]
) -> None:
    for of_rank in report:
        found = of_rank[f"{case}, {dtype}"]
        assert found[f"ep {ep}"] == found["alone"]


def test_no_rows_give_none(report: list[dict[str, Any]]) -> None:
    assert [of_rank["no rows"]["shape"] for of_rank in report] == [[0, HIDDEN]] * 4


def test_outputs_differ_between_cases(report: list[dict[str, Any]]) -> None:
    """The negative control: digests tell rows and dtypes apart."""
    found = {of_rank[f"even, {dtype}"]["ep 4"] for of_rank in report for dtype in DTYPES}
    assert len(found) == 4 * len(DTYPES)
