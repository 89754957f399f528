"""Run under torchrun by test_split_experts.py: `experts_ranks.py WORK_FOLDER OUT.json`, on 4 ranks.

A trainer of a mixture takes the same steps where 1, 2 and 4 ranks share its experts. Some of them
go on from a checkpoint of another number, or from an exported folder. Everything is told as bits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import Placement, RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.checkpoint_ranks import digests, logprobs
from tests.dist.train_case import make_batch, write_glm_folder

STEPS = 6
SPLITS = {
    "ep 1": RoleSplit(),
    "ep 2": RoleSplit(ep=2),
    "ep 4": RoleSplit(ep=4),
    "2 copies, ep 1": RoleSplit(dp=2),
    "2 copies, ep 2": RoleSplit(dp=2, ep=2),
    "4 copies, ep 4": RoleSplit(dp=4, ep=4),
}
CONFIG = TrainerConfig(
    init="random",
    lr=1e-2,
    eps=1e-4,
    max_tokens=120,
    clip_norm=0.05,
    deterministic=True,
    backend=Fsdp2Config(wrap="layer"),
)
METRICS = ("train/loss", "train/grad_norm", "train/entropy", "experts/max_load")


def steps(trainer: Trainer, first: int, count: int) -> list[dict[str, str]]:
    """Take some steps, and return metrics as bits."""
    context, found = trainer.context, []
    for seed in range(first, first + count):
        batch = make_batch(seed).shard(context.data_size)[context.data_rank]
        metrics = trainer.train_step(batch, grpo_loss)
        found.append({name: metrics[name].hex() for name in METRICS})
    return found


def of_run(trainer: Trainer, count: int = STEPS) -> dict[str, Any]:
    first = logprobs(trainer)
    metrics = steps(trainer, 0, count)
    return {
        "first": first,
        "metrics": metrics,
        "last": logprobs(trainer),
        "state": digests(trainer),
    }


def held(trainer: Trainer) -> list[tuple[list[str], int]]:
    """The weights of which each rank has some rows, and the bytes of all its rows."""
    weights = trainer.backend.state()["weights"]
    own = sorted(name for name, one in weights if one.local.numel())
    num_bytes = sum(one.local.nbytes for _, one in weights)
    blobs = trainer.context.all_gather_bytes(msgspec.msgpack.encode((own, num_bytes)))
    return [msgspec.msgpack.decode(blob, type=tuple[list[str], int]) for blob in blobs]


def gathered(trainer: Trainer) -> dict[str, str]:
    """Whole weights as bits, as this rank sees them."""
    return {
        name: np.asarray(trainer.backend.gather(name).detach()).tobytes().hex()
        for name in trainer.backend.names()
    }


def main(work: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    placements: dict[str, Placement] = {
        name: plan_split({"train": split}, world.size).train for name, split in SPLITS.items()
    }
    meshes.build(list(placements.values()))

    def built(split: str, model: Path = work, **settings: Any) -> Trainer:
        context: RoleContext = meshes.context(placements[split])
        return Trainer(replace(CONFIG, **settings), context, str(model))

    report: dict[str, Any] = {"runs": {}, "resumed": {}, "exported": {}, "copies": {}, "glm": {}}
    for split in ("ep 1", "ep 2", "ep 4"):
        report["runs"][split] = of_run(built(split))
    saved = built("ep 2")
    report["held"] = {split: held(built(split)) for split in ("ep 1", "ep 2", "ep 4")}
    steps(saved, 0, 3)
    saved.save(str(work / "saved"))
    saved.wait_until_saved()
    saved.export_hf(str(work / "hf"))
    whole = gathered(saved)
    report["after"] = steps(saved, 3, 2), digests(saved)
    for split in ("ep 1", "ep 4"):
        resumed = built(split, seed=7)
        resumed.load(str(work / "saved"))
        report["resumed"][split] = steps(resumed, 3, 2), digests(resumed)
        loaded = built(split, work / "hf", init="folder")
        report["exported"][split] = gathered(loaded) == whole
    for recompute in ("cheap", "all"):
        backend = Fsdp2Config(wrap="layer", recompute=recompute)
        report[recompute] = of_run(built("ep 2", backend=backend), 3)
    if world.rank == 0:
        write_glm_folder(work / "glm")
    dist.barrier()
    for split, recompute in product(("ep 1", "ep 2"), ("none", "all")):
        backend = Fsdp2Config(wrap="layer", recompute=recompute)
        report["glm"][f"{split}, {recompute}"] = of_run(
            built(split, work / "glm", backend=backend), 2
        )
    for split in ("2 copies, ep 1", "2 copies, ep 2", "4 copies, ep 4"):
        trainer = built(split, deterministic=False)
        report["copies"][split] = [
            {name: float.fromhex(one) for name, one in row.items()} for row in steps(trainer, 0, 3)
        ]
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
