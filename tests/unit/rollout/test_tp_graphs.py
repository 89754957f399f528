"""Engines that share a model and record decoding, as threads with graphs of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Engine, Request
from spmd_rl.rollout.native import engine as engine_module
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.step_budget import PrefillBound
from spmd_rl.rollout.native.tp import build
from tests.dist import host_graphs
from tests.dist.host_graphs import HostGraphs
from tests.samples import Samples
from tests.unit.rollout.test_exact import unequal, workload
from tests.unit.rollout.test_tp import CPU, Together, together, weights_and_model

CFG: dict[str, Any] = {"max_batch": 10, "page_size": 4, "num_pages": 80, "max_step_tokens": 40}


def requests() -> list[Request]:
    """Graphs of the host do not encode the sets of filters."""
    return [
        Request(
            one.uid,
            one.index,
            one.prompt,
            replace(one.sampling, replay_filters=False),
            seed=one.seed,
        )
        for one in workload()
    ]


def drawn(engine: Engine) -> Samples:
    """Requests come while others decode; one prompt's stop, and go on later."""
    first, later = requests()[:5], requests()[5:]
    samples: Samples = {}
    for request in first:
        engine.submit(request)
    step = 0
    while engine.has_work or later:
        if step == 6:
            stopped = {(one.prompt_uid, one.index): one for one in engine.abort(1)}
            asked = [one for one in first if (one.uid, one.index) in stopped]
            later = [one.resumed(stopped[one.uid, one.index]) for one in asked] + later
            assert asked
        if step >= 6 and later:
            engine.submit(later.pop(0))
        for sample in engine.step().finished:
            samples[sample.prompt_uid, sample.index] = sample
        step += 1
    return samples


def replayed(engines: Together) -> list[list[int]]:
    """The sizes of the graphs that each rank replayed, in their order."""
    found = [engine._runner._decode_graphs for engine in engines.engines]
    return [one.sizes for one in found if isinstance(one, HostGraphs)]


@pytest.fixture
def _on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fused projections: a CPU's library takes other chains for their columns."""
    host_graphs.use(monkeypatch)
    monkeypatch.setattr(CausalLM, "fuse_projections", lambda self: None)


@pytest.fixture(scope="module")
def shared() -> Any:
    """Weights, and a model that has all of them and sums in four parts."""
    return weights_and_model(4, "qwen3", (4, 2))


@pytest.fixture(scope="module")
def alone(shared: Any) -> Samples:
    engine = NativeEngine(shared[1], NativeEngineConfig(**CFG), CPU)
    engine.sink().commit(0)
    return drawn(engine)


@pytest.mark.usefixtures("_on_host")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_replay_the_same_graphs_and_draw_what_one_engine_does(
    num_ranks: int, shared: Any, alone: Samples
) -> None:
    weights, model = shared
    engines = together(model, weights, num_ranks, is_recordable=True, **CFG)
    assert unequal(drawn(engines), alone) == 0
    first, *others = replayed(engines)
    assert others == [first] * (num_ranks - 1)
    assert len(set(first)) > 2
    assert engines.stats()["num_graphs"] >= len(set(first))


@pytest.mark.usefixtures("_on_host")
def test_prompts_are_bounded_by_what_a_rank_computes(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, model = shared
    seen = []

    def bound(spec: ModelSpec, device: torch.device, cfg: NativeEngineConfig) -> PrefillBound:
        seen.append(spec)
        return PrefillBound()

    monkeypatch.setattr(engine_module, "prefill_bound", bound)
    engines = together(model, weights, 2, is_recordable=True, **CFG).engines
    assert seen == [one.model.own_spec for one in engines]
    assert seen[0] != model.spec


@pytest.mark.usefixtures("_on_host")
def test_an_exchange_that_is_not_recordable_keeps_steps_eager(shared: Any, alone: Samples) -> None:
    weights, model = shared
    engines = together(model, weights, 2, **CFG)
    assert unequal(drawn(engines), alone) == 0
    assert replayed(engines) == []
    assert engines.stats()["num_graphs"] == 0


@pytest.mark.parametrize(
    ("device", "local_size", "records", "name"),
    [
        ("cuda", 4, True, "SymmExchange"),
        ("cuda", 2, True, "SymmExchange"),
        ("cuda", 1, True, "TorchExchange"),
        ("cuda", 4, False, "TorchExchange"),
        ("cpu", 4, True, "TorchExchange"),
    ],
)
def test_memory_of_peers_is_for_recorded_steps_on_gpus_of_one_host(
    device: str, local_size: int, records: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("SymmExchange", "TorchExchange"):
        monkeypatch.setattr(build, one, lambda group, one=one: (one, group))
    world = World(3, 4, 3 % local_size, local_size, 3 // local_size, run_id="test", restart=0)
    placement = plan_split({"infer": RoleSplit(tp=2)}, 4).infer
    nothing: Any = None
    monkeypatch.setattr(RoleContext, "device", torch.device(device))
    monkeypatch.setattr(RoleContext, "axis_group", lambda self, along: "a group")
    context = RoleContext(world, placement, nothing, nothing, {})
    part = build.part_of(context, records=records)
    assert (part.index, part.count, part.exchange) == (1, 2, (name, "a group"))
