"""Run under torchrun by test_expert_ranks.py: `expert_ranks.py WHAT MODEL OUT.json`.

WHAT is layers, gathers, steps, or "lose WAY PLACE". Experts lie on 1, 2 and 4 GPUs, with each
dispatcher that is installed. Everything is told as bits, and so is a control: sums of slots that
each rank rounds.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.kernels.linear.linear import linear_fp32
from spmd_rl.kernels.moe.deep_ep_buffer import PACKAGE
from spmd_rl.kernels.moe.deep_ep_dispatcher import DeepEpDispatcher
from spmd_rl.kernels.moe.dispatcher import Dispatched, EpDispatcher, _AllToAll
from spmd_rl.kernels.moe.expert_gather import TorchGather
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.symm_gather import RowSizes, SymmGather
from spmd_rl.kernels.runtime.cuda_graph import record
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.kernels.runtime.versions import installed
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.split_experts import SplitExperts
from spmd_rl.train.config import EpDispatcherKind, Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.test_split_experts import steps
from tests.dist.trainers import digests, logprobs, own_group

BF16 = torch.bfloat16
STEPS = 20
STACKS_S = 120  # after which ranks that still run say where
DISPATCHERS: dict[str, type[EpDispatcher]] = {"torch": EpDispatcher} | (
    {"deep_ep": DeepEpDispatcher} if installed(PACKAGE) else {}
)


class Shape(NamedTuple):
    hidden: int
    experts: int
    chosen: int
    inner: int


SMALL, LARGE = Shape(256, 8, 4, 96), Shape(2048, 128, 8, 768)
CASES: dict[str, tuple[Shape, tuple[int, ...], dict[int, float]]] = {
    "even": (SMALL, (400, 333, 48, 290), {}),
    "a rank with one token": (SMALL, (40, 1, 170, 64), {}),
    "all to the last rank's experts": (SMALL, (19, 24, 1, 300), dict.fromkeys(range(4, 8), 50.0)),
    "30B-A3B": (LARGE, (2048, 1500, 1, 700), {}),
}
SHARED = 96  # hidden units that every token takes while rows are on their way
ROWS = 64  # of a rank in a gather, padding included
GATHERS: dict[str, tuple[int, ...]] = {  # rows that each rank uses
    "full": (64, 64, 64, 64),
    "uneven": (3, 64, 1, 17),
    "ranks without rows": (0, 5, 0, 0),
    "no rows": (0, 0, 0, 0),
}


def digest(tensor: Tensor) -> str:
    found = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(found).hexdigest()


def mixture(
    shape: Shape, bias: dict[int, float], dtype: torch.dtype = torch.float32, shared: int = 0
) -> MoeMlp:
    """The same on every rank. With other than float32, experts have no copies to round."""
    with torch.device("meta"):
        hidden, experts, chosen, inner = shape
        module = Moe(hidden, experts, chosen, inner, shared_size=shared).module(0)
    assert isinstance(module, MoeMlp)
    module = module.to_empty(device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        parameter.data = parameter.data.to(dtype if name.startswith("experts.") else BF16)
    with torch.no_grad():
        for expert, amount in bias.items():
            module.gate.weight[expert, 0] = amount
    return module


def tokens_of(rank: int, number: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Rows of a rank, and the gradient of what the mixture gives them."""
    generator = torch.Generator().manual_seed(10 + rank)
    x, pull = torch.randn(2, number, hidden, generator=generator).to(BF16).cuda()
    x[:, 0] = x[:, 0].abs() + 1
    return x, pull


def results(module: MoeMlp, x: Tensor, pull: Tensor) -> dict[str, Tensor]:
    """Outputs, and gradients of this rank."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(pull)
    found = {"out": out, "x": x.grad}
    with torch.no_grad():
        found["out without gradients"] = module(x)
    return found | {name: one.grad for name, one in module.named_parameters()}


def over_copies(found: dict[str, Tensor], ep: int, rank: int) -> dict[str, Tensor]:
    """The same, where gradients of experts are summed over their copies as FSDP does."""
    own = {n: one.float().cpu() for n, one in found.items() if n.startswith("experts.")}
    every: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    copies = every[rank % ep :: ep]
    return found | {name: sum_neighbours([one[name].clone() for one in copies]) for name in own}


def rounded_combine(self: EpDispatcher, y: Tensor, sent: Dispatched) -> Tensor:
    """The control: what each rank's experts give a token is summed and rounded, then added."""
    rows = call(_AllToAll, y, sent.received, sent.sent, self._group)
    ends = torch.tensor(sent.sent, device=y.device).cumsum(0)
    owner = torch.searchsorted(ends, sent.order.rows, right=True).unsqueeze(2)
    slots = rows[sent.order.rows].float()
    total = torch.zeros_like(slots[:, 0]).to(y.dtype)
    for rank in range(self.num_ranks):
        total = total + (slots * (owner == rank)).sum(1).to(y.dtype)
    return total


@contextmanager
def rounding() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpDispatcher, "combine", rounded_combine)
        yield


def of_layers(world: World) -> dict[str, Any]:
    """For each case: digests of one rank that has all experts, and of ranks that share them."""
    groups = {ep: own_group(ep, world) for ep in (2, 4) if ep <= world.size}
    report: dict[str, Any] = {"dispatchers": list(DISPATCHERS)}
    for case, (shape, numbers, bias) in CASES.items():
        x, pull = tokens_of(world.rank, numbers[world.rank], shape.hidden)
        alone = results(mixture(shape, bias, BF16, SHARED), x, pull)
        if shape == SMALL:
            alone = over_copies(alone, 1, world.rank)
        report[f"{case}, alone"] = {name: digest(one) for name, one in alone.items()}
        del alone
        for ep, group in groups.items():
            for kind, dispatcher in DISPATCHERS.items():
                module = mixture(shape, bias, shared=SHARED)
                module.split(group, dispatcher(group, shape.experts))
                found = results(module, x, pull)
                if shape == SMALL:
                    found = over_copies(found, ep, world.rank)
                digests_of = {name: digest(one) for name, one in found.items()}
                report[f"{case}, ep {ep}, {kind}"] = digests_of
                del module, found
    report |= without_rows(world, groups)
    x, _ = tokens_of(world.rank, 400, SMALL.hidden)
    module = mixture(SMALL, {})
    module.split(groups[2])
    with torch.no_grad():
        exact = module(x)
        with rounding():
            control = module(x)
    report["control"] = float((exact != control).float().mean())
    return report


@torch.no_grad()
def without_rows(world: World, groups: dict[int, dist.ProcessGroup]) -> dict[str, str]:
    """A pass in which the first rank has no rows: digests of all ranks' sums."""
    whole, number = mixture(SMALL, {}, BF16), 37 * (world.rank > 0)
    x = tokens_of(world.rank, 37, SMALL.hidden)[0]
    routes = whole.routes_at_once(linear_fp32(x, whole.gate.weight))
    found = {"no rows, alone": digest(whole.one_by_one(x, routes)[:number])}
    x, routes = x[:number], ExpertRoutes(routes.ids[:number], routes.weights[:number])
    for ep, group in groups.items():
        for kind, dispatcher in DISPATCHERS.items():
            module = mixture(SMALL, {}, BF16)
            module.split(group, dispatcher(group, SMALL.experts))
            found[f"no rows, ep {ep}, {kind}"] = digest(module.experts(x, routes))
    return found


def padded(module: MoeMlp, rank: int, used: int) -> tuple[Tensor, ExpertRoutes]:
    """Rows of which the last are padding, and their routes."""
    x = torch.zeros(ROWS, SMALL.hidden, dtype=BF16, device="cuda")
    x[:used] = tokens_of(rank, max(used, 1), SMALL.hidden)[0][:used]
    routes = module.routes_at_once(linear_fp32(x, module.gate.weight))
    routes.ids[used:] = SMALL.experts
    routes.weights[used:] = 0
    return x, routes


def two_layers(experts: SplitExperts, x: Tensor, routes: ExpertRoutes) -> Tensor:
    """One layer behind the other, in the same memory of peers."""
    return experts(experts(x, routes), routes)


@torch.no_grad()
def of_gathers(world: World) -> dict[str, Any]:
    """The used rows of each case: alone, by torch, by peers' memory, and from a recorded graph."""
    groups = {ep: own_group(ep, world) for ep in (2, 4) if ep <= world.size}
    whole = mixture(SMALL, {}, BF16)
    report: dict[str, Any] = {}
    assert isinstance(whole.experts, nn.ModuleList)
    inputs = {case: padded(whole, world.rank, used[world.rank]) for case, used in GATHERS.items()}
    for case, (x, routes) in inputs.items():
        used = GATHERS[case][world.rank]
        taken = ExpertRoutes(routes.ids[: max(used, 1)], routes.weights[: max(used, 1)])
        alone = whole.one_by_one(x[: max(used, 1)], taken) if used else x
        report[f"{case}, alone"] = digest(alone[:used])
    for ep, group in groups.items():
        module = mixture(SMALL, {}, BF16)
        module.split(group)
        experts = module.experts
        assert isinstance(experts, SplitExperts)
        sizes = RowSizes(SMALL.hidden, SMALL.chosen, BF16)
        symm = SymmGather(group, SMALL.experts, ROWS, sizes)
        for name, gather in (("torch", TorchGather(group, SMALL.experts)), ("symm", symm)):
            experts.gather = gather
            for case, given in inputs.items():
                found = experts(*given)[: GATHERS[case][world.rank]]
                report[f"{case}, ep {ep}, {name}"] = digest(found)
        x, ids, weights = (one.clone() for one in (inputs["full"][0], *inputs["full"][1]))
        work = partial(two_layers, experts, x, ExpertRoutes(ids, weights))
        graph, out = record(work, torch.cuda.graph_pool_handle())
        eager = {case: two_layers(experts, *given) for case, given in inputs.items()}
        for _ in range(20):
            for case, (one, routes) in inputs.items():
                for static, new in zip((x, ids, weights), (one, *routes), strict=True):
                    static.copy_(new)
                graph.replay()
                if not torch.equal(out, eager[case]):
                    report[f"{case}, ep {ep}, graph"] = "differs"
        report[f"ep {ep}, replays"] = True
    return report


def of_steps(world: World, model: Path) -> dict[str, Any]:
    """A trainer's log-probs, losses, norms, weights and moments, over all steps."""
    is_deterministic = flash_supports(64, BF16, torch.device("cuda"))
    cfg = TrainerConfig(
        init="random",
        lr=1e-3,
        max_tokens=120,
        clip_norm=0.05,
        deterministic=is_deterministic,
        backend=Fsdp2Config(wrap="layer"),
    )
    sizes = [ep for ep in (1, 2, 4) if ep <= world.size]
    placements = {ep: plan_split({"train": RoleSplit(ep=ep)}, world.size).train for ep in sizes}
    meshes = Meshes(world)
    meshes.build(list(placements.values()))

    def run(ep: int, kind: EpDispatcherKind = "torch", **settings: Any) -> dict[str, Any]:
        backend = Fsdp2Config(wrap="layer", ep_dispatcher=kind, **settings)
        trainer = Trainer(replace(cfg, backend=backend), meshes.context(placements[ep]), str(model))
        first, metrics = logprobs(trainer), steps(trainer, 0, STEPS)
        last = logprobs(trainer)
        return {"first": first, "metrics": metrics, "last": last, "state": digests(trainer)}

    report: dict[str, Any] = {"deterministic": is_deterministic, "ep 1": run(1)}
    for ep in sizes[1:]:
        report[f"ep {ep}"] = run(ep)
        if "deep_ep" in DISPATCHERS:
            report[f"ep {ep}, deep_ep"] = run(ep, "deep_ep")
            report[f"ep {ep}, deep_ep, recompute"] = run(ep, "deep_ep", recompute="all")
    for ep in sizes:
        report[f"ep {ep}, recompute"] = run(ep, recompute="all")
    with rounding():
        report["control"] = run(2)
    return report


def lose_a_rank(world: World, way: str, place: str, struck: Path) -> None:
    """Have the last rank die where the others then wait for it: on the host, or on the device."""
    group = own_group(world.size, world)
    module = mixture(SMALL, {}, BF16)
    module.split(group, DISPATCHERS.get(way, EpDispatcher)(group, SMALL.experts))
    experts, x = module.experts, tokens_of(world.rank, ROWS, SMALL.hidden)[0]
    assert isinstance(experts, SplitExperts)
    if way == "symm":
        sizes = RowSizes(SMALL.hidden, SMALL.chosen, BF16)
        experts.gather = SymmGather(group, SMALL.experts, ROWS, sizes)
    routes = module.routes_at_once(linear_fp32(x, module.gate.weight))
    with torch.no_grad():
        experts(x, routes)
        sent = experts.dispatcher.dispatch(x, routes) if place == "combine" else None
        torch.cuda.synchronize()
        dist.barrier()
        if world.rank == world.size - 1:
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if sent is None:
            experts(x, routes)
        else:
            experts.dispatcher.combine(sent.rows, sent)
        torch.cuda.synchronize()


def main(what: str, model: Path, out: Path) -> None:
    faulthandler.dump_traceback_later(STACKS_S, repeat=True)
    world = World.from_env()
    join(world, open_store(world))
    if what.startswith("lose "):
        _, way, place = what.split()
        lose_a_rank(world, way, place, out)
        return
    if what == "steps":
        report: Any = of_steps(world, model)
    else:
        report = [{} for _ in range(world.size)]
        own = of_layers(world) if what == "layers" else of_gathers(world)
        dist.all_gather_object(report, own)
    if world.rank == 0:
        out.write_text(json.dumps(report))
    torch.cuda.synchronize()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
