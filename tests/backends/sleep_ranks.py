"""Run under torchrun by test_megatron_sleep.py: `sleep_ranks.py MODEL_FOLDER OUT.json`.

Two trainers of each case take the same steps, and one of them sleeps in between. Each rank reports
what it saw.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ResidencyError
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.offload.phases import ALL, RoleSleep
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.backend import Megatron
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.weights.ends import WeightSource
from tests.backends.megatron_case import make_batch

PHASES = {"sync": ("master",), "rollout": (), "train": ALL}
TAGS = "master", "moments"
CASES: dict[str, tuple[dict[str, int], str, bool]] = {
    "dp 2": ({"dp": 2}, "bfloat16", True),
    "tp 2": ({"tp": 2}, "float32", False),
}


def run(name: str, context: RoleContext, folder: str) -> dict[str, Any]:
    _, dtype, is_distributed = CASES[name]
    backend = MegatronConfig(distributed_optimizer=is_distributed)
    cfg = TrainerConfig(backend=backend, lr=1e-2, dtype=dtype, max_tokens=100)
    awake = Trainer(cfg, context, folder)
    trainer = Trainer(cfg, context, folder, sleep=RoleSleep("train", PHASES))
    first = weights_of(awake)
    learn(awake, 0)
    learn(trainer, 0)
    source = trainer.weight_source()
    held = {tag: storages(tensors) for tag, tensors in memory_of(trainer).items()}
    report: dict[str, Any] = {"own_bytes": {tag: num_bytes(held[tag]) for tag in TAGS}}
    own = context.shard_rank  # among the receipts of all ranks of its shard
    report["awake_moments"] = trainer.sleep(("moments",))[own].after["moments"]
    assert num_bytes(held["master"]) == report["own_bytes"]["master"], "it does not sleep yet"
    receipts = trainer.sleep()
    report["all_have_one"] = len(receipts) == context.shard_size
    report["slept_bytes"] = {tag: receipts[own].after[tag] for tag in TAGS}
    report["left_storage_bytes"] = {tag: num_bytes(held[tag]) for tag in TAGS}
    report["refused"] = {
        "score": refusal(lambda: trainer.score(shard_of(0, context))),
        "save": refusal(lambda: woken_and_saved(trainer)),
        "push": refusal(lambda: asleep_and_pushed(trainer, source)),
    }
    trainer.wake()
    learn(awake, 1)
    learn(trainer, 1)
    scores = [one.score(shard_of(2, context)).values.tolist() for one in (awake, trainer)]
    ours, theirs = weights_of(trainer), weights_of(awake)
    return report | {
        "equal_scores": scores[0] == scores[1],
        "equal_weights": all(map(torch.equal, ours, theirs)),
        "learned": not any(map(torch.equal, ours, first)),
    }


def memory_of(trainer: Trainer) -> dict[str, list[Tensor]]:
    """All tensors that outlive a step, by tag, as the modules and checkpoints name them."""
    backend = trainer.backend
    assert isinstance(backend, Megatron)
    state = {kind: [one.local for _, one in own] for kind, own in backend.state().items()}
    parameters = [one for model in backend._models for one in model.parameters()]
    gradients = [one.main_grad for one in parameters]
    master = [*parameters, *gradients, *state.pop("weights")]
    return {"master": master, "moments": [one for own in state.values() for one in own]}


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return list({one._cdata: one for one in (x.untyped_storage() for x in tensors)}.values())


def num_bytes(held: list[torch.UntypedStorage]) -> int:
    return sum(one.nbytes() for one in held)


def woken_and_saved(trainer: Trainer) -> None:
    """A checkpoint while the weights are awake and the moments sleep, as in the phase sync."""
    trainer.wake(("master",))
    trainer.save("never")


def asleep_and_pushed(trainer: Trainer, source: WeightSource) -> None:
    trainer.sleep(("master",))
    source.open()


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except ResidencyError as error:
        return str(error)
    return ""


def learn(trainer: Trainer, seed: int) -> None:
    trainer.train_step(shard_of(seed, trainer.context), grpo_loss)


def shard_of(seed: int, context: RoleContext) -> Batch:
    return make_batch(seed).shard(context.data_size)[context.data_rank]


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [one.local.detach().clone() for _, one in trainer.backend.state()["weights"]]


def main(folder: str, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    placements = [
        plan_split({name: RoleSplit(**split)}, world.size)[name]
        for name, (split, _, _) in CASES.items()
    ]
    meshes.build(placements)
    report = {one.name: run(one.name, meshes.context(one), folder) for one in placements}
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, report)
    if world.rank == 0:
        out.write_text(json.dumps({"ranks": reports}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
