"""Run under torchrun by test_shared_ranks.py: `shared_ranks.py MODEL OUT.json`, on 2 GPUs.

Ranks share sequences, and a fixed number of parts of a batch. Log-probs are told as bits, weights
and moments as digests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.test_data_parts import train
from tests.dist.trainers import digests, logprobs

SPLITS = {"one": RoleSplit(ranks="0-0"), "two": RoleSplit(), "cp 2": RoleSplit(cp=2)}


def main(model: Path, out: Path) -> None:
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    placements = {name: plan_split({"train": one}, 2).train for name, one in SPLITS.items()}
    meshes.build(list(placements.values()))
    report: dict[str, Any] = {"first": {}, "state": {}}
    for split, placement in placements.items():
        if world.rank not in placement.ranks:
            continue
        cfg = TrainerConfig(init="random", lr=1e-2, max_tokens=120)
        report["first"][split] = logprobs(Trainer(cfg, meshes.context(placement), str(model)))
        if split != "cp 2" and flash_supports(64, torch.bfloat16, torch.device("cuda")):
            fixed = TrainerConfig(
                init="random", lr=1e-2, max_tokens=120, deterministic=True, data_parts=2
            )
            trainer = Trainer(fixed, meshes.context(placement), str(model))
            report["state"][split] = train(trainer, 0, 5), digests(trainer)
    dist.barrier()
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
