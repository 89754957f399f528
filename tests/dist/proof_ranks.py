"""Run under torchrun by test_proof.py: ranks prove to each other that they are of one start.

The last rank plays an impostor, which has another key.
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


def error_of(act: Callable[[], None]) -> str:
    """Return the error that `act` raises, or an empty string."""
    try:
        act()
    except SpmdError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    world = World.from_env()
    join(world, open_store(world))
    honest = error_of(lambda: connection_proof.prove(world))
    genuine = connection_proof.STORE_KEY
    if world.rank == world.size - 1:
        connection_proof.STORE_KEY = "another"
    impostor = error_of(lambda: connection_proof.prove(world))
    in_a_mesh = error_of(
        lambda: Meshes(world).build([*plan_split({"role": RoleSplit()}, world.size).values()])
    )
    connection_proof.STORE_KEY = genuine
    if world.rank == 0:
        out.write_text(json.dumps([honest, impostor, in_a_mesh]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
