"""Run under torchrun by test_tensor_shards.py: `tensor_ranks.py DENSE OUT.json`, on 4 ranks, where
1, 2 and 4 of them share each matrix. Log-probs are told as bits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.checkpoint_ranks import logprobs

SPLITS = {
    "tp 1": RoleSplit(),
    "tp 2": RoleSplit(tp=2),
    "tp 4": RoleSplit(tp=4),
    "2 copies, tp 2": RoleSplit(dp=2, tp=2),
}
CONFIG = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=60)
ROW_SHARDS = 4


def main(dense: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    placements = {name: plan_split({"train": one}, 4).train for name, one in SPLITS.items()}
    meshes.build(list(placements.values()))

    def built(split: str, **settings: Any) -> Trainer:
        context = meshes.context(placements[split], ROW_SHARDS)
        return Trainer(replace(CONFIG, **settings), context, str(dense))

    report: dict[str, Any] = {"dense": {split: logprobs(built(split)) for split in SPLITS}}
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
