"""Ranks that prove to each other who they are; the last of them may be an impostor, who holds
another key.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from spmd_rl.errors import SpmdError
from spmd_rl.mesh import connection_proof
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store


def said(act: Callable[[], None]) -> str:
    """The sentence that it is refused with, empty if it is not."""
    try:
        act()
    except SpmdError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    world = World.from_env()
    join(world, open_store(world))
    honest = said(lambda: connection_proof.prove(world))
    genuine = connection_proof.STORE_KEY
    if world.rank == world.size - 1:
        connection_proof.STORE_KEY = "another"
    impostor = said(lambda: connection_proof.prove(world))
    in_a_mesh = said(
        lambda: Meshes(world).build([*plan_split({"role": RoleSplit()}, world.size).values()])
    )
    connection_proof.STORE_KEY = genuine
    if world.rank == 0:
        out.write_text(json.dumps([honest, impostor, in_a_mesh]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
