"""Run under torchrun by test_joint_steps.py: `joint_ranks.py MODEL OUT.json`, on four ranks.

Engines that share experts by twos and by fours record their decoding steps (host_graphs.py). Each
rank has requests of its own, one of them none. The report has the samples of each rank, those of an
engine with all experts, and the sizes of the graphs that each replayed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.build import build
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks
from spmd_rl.types.samples import Sample
from tests.dist import host_graphs
from tests.dist.dispatcher_ranks import own_group
from tests.dist.host_graphs import HostGraphs

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


def main(model: str, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_env()
    join(world, open_store(world))
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
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, report)
    if world.rank == 0:
        out.write_text(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
