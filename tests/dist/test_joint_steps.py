"""Engines that share experts and record decoding, on gloo ranks with graphs of the host.

Each rank has requests of its own, one of them none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from spmd_rl.mesh.world import World
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.build import build
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks
from spmd_rl.types.samples import Sample
from tests.dist import host_graphs
from tests.dist.host_graphs import HostGraphs
from tests.dist.recipes.mixtures import write_mixture
from tests.dist.torchrun import on_ranks
from tests.dist.trainers import own_group

pytestmark = pytest.mark.dist

Report = list[dict[str, Any]]
SAMPLING = SamplingConfig(max_tokens=14, ignore_eos=True, replay_filters=False)
LATE = (0, 9, 3)  # the step at which a rank's first requests come
CONFIG = NativeEngineConfig(max_batch=9, num_pages=14, page_size=8, max_step_tokens=20)


class Work(NamedTuple):
    """Requests by the step before which they come, and those that stop and go on."""

    requests: dict[int, list[Request]]
    stopped: dict[int, int]


def work_of(rank: int) -> Work:
    """The last rank has no requests."""
    if rank == len(LATE):
        return Work({}, {})
    rng = np.random.default_rng(rank)
    requests: dict[int, list[Request]] = {}
    for uid in range(3 + 2 * rank):
        prompt = rng.integers(2, 40, int(rng.integers(1, 30))).astype(np.int32)
        top_k = 5 if uid == 1 else 0
        sampling = replace(SAMPLING, top_k=top_k, max_tokens=int(rng.integers(2, 15)))
        sampling = replace(sampling, replay_routes=rank == 1)
        of_prompt = [Request(uid, index, prompt, sampling, seed=rank) for index in range(3)]
        requests.setdefault(LATE[rank] + 4 * uid, []).extend(of_prompt)
    return Work(requests, {LATE[rank] + 6: 1})


def told(sample: Sample) -> Any:
    columns = {name: np.asarray(one).tolist() for name, one in sample.data.columns.items()}
    return [sample.tokens.tolist(), sample.logprobs.view(np.int32).tolist(), columns]


def drawn(engine: NativeEngine, work: Work, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The samples of a rank's engine, which takes part in steps while any rank has work."""
    samples: dict[str, Any] = {}
    step, last = 0, max([*work.requests, -1])
    while True:
        has_work = torch.tensor([int(engine.has_work or step <= last)])
        if group is not None:
            dist.all_reduce(has_work, op=dist.ReduceOp.MAX, group=group)
        if not has_work.item():
            return samples
        if (uid := work.stopped.get(step)) is not None:
            ended = engine.abort(uid)
            asked = {(one.uid, one.index): one for some in work.requests.values() for one in some}
            for one in ended:
                engine.submit(asked[one.prompt_uid, one.index].resumed(one))
        for request in work.requests.get(step, []):
            engine.submit(request)
        if engine.has_work or group is not None:
            for sample in engine.step().finished:
                samples[f"{sample.prompt_uid}/{sample.index}"] = told(sample)
        step += 1


def new_engine(model: str, experts: ExpertRanks | None) -> NativeEngine:
    cpu = torch.device("cpu")
    cfg = replace(CONFIG, cuda_graphs=experts is not None)
    return build(cfg, model, cpu, lambda tokens: "", experts=experts)


def on_rank(world: World, model: str) -> dict[str, Any]:
    """The samples of this rank, those of an engine with all experts, and the sizes of the graphs
    that each replayed.
    """
    work = work_of(world.rank)
    report: dict[str, Any] = {"alone": drawn(new_engine(model, None), work, None)}
    with pytest.MonkeyPatch.context() as patch:
        host_graphs.use(patch)
        for ep in (2, 4):
            group = own_group(ep, world)
            engine = new_engine(model, ExpertRanks(group, True))
            report[f"ep {ep}"] = drawn(engine, work, group)
            graphs = engine._runner._decode_graphs
            assert isinstance(graphs, HostGraphs)
            report[f"sizes {ep}"] = graphs.sizes
            report[f"graphs {ep}"] = engine.stats()["num_graphs"]
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    model = write_mixture(tmp_path_factory.mktemp("joint") / "model", "qwen3_moe")
    return on_ranks(on_rank, 4, str(model))


@pytest.mark.parametrize("ep", [2, 4])
def test_samples_are_those_of_an_engine_with_all_experts(ep: int, report: Report) -> None:
    """Tokens, log-probs, hashes and recorded routes, after aborts and with few pages."""
    for of_rank in report:
        assert of_rank[f"ep {ep}"] == of_rank["alone"]
    assert [len(of_rank["alone"]) for of_rank in report] == [9, 15, 21, 0]


@pytest.mark.parametrize("ep", [2, 4])
def test_all_ranks_replay_equally_many_rows(ep: int, report: Report) -> None:
    """Also a rank without any request of its own."""
    groups = [report[first : first + ep] for first in range(0, 4, ep)]
    for group in groups:
        first, *others = (of_rank[f"sizes {ep}"] for of_rank in group)
        assert others == [first] * (ep - 1)
        assert len(set(first)) > 2
    assert report[3][f"graphs {ep}"] == len(set(report[3][f"sizes {ep}"]))


def test_requests_differ_between_ranks(report: Report) -> None:
    """The negative control: a rank's samples are its own."""
    assert report[0]["alone"]["0/0"] != report[1]["alone"]["0/0"]
