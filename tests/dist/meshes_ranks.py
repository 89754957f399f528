"""Run under torchrun by test_meshes.py: `meshes_ranks.py OUT.json`, on four ranks.

Builds the meshes of a role on ranks 0 to 2 and of one on ranks 2 and 3, whose shard is both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import Placement
from spmd_rl.mesh.world import World, join, open_store

AXES = {"pp": 1, "dp": 1, "fsdp": 1, "cp": 1, "tp": 1}
TRAIN = Placement("train", (0, 1, 2), AXES | {"fsdp": 3})
INFER = Placement("infer", (2, 3), AXES | {"tp": 2})


def main(out: Path) -> None:
    world = World.from_env()
    join(world, open_store(world))
    asked: list[list[int]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], *args: Any, **more: Any) -> Any:
        if more.get("backend") == "gloo":
            asked.append(ranks)
        return new_group(ranks, *args, **more)

    dist.new_group = noted
    meshes = Meshes(world)
    meshes.build([TRAIN, INFER])
    heard = ""
    if world.rank in INFER.ranks:
        context = meshes.context(INFER)
        heard = context.broadcast_in_shard(f"from {world.rank}".encode()).decode()
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, (asked, heard))
    if world.rank == 0:
        out.write_text(json.dumps({"asked": [a for a, _ in every], "heard": [h for _, h in every]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
