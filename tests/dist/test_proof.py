"""A process that takes the place of a rank in a gloo connection is detected before it gets data."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spmd_rl.errors import SpmdError
from spmd_rl.mesh import connection_proof
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World
from tests.dist.torchrun import on_ranks

pytestmark = pytest.mark.dist


def error_of(act: Callable[[], None]) -> str:
    """Return the error that `act` raises, or an empty string."""
    try:
        act()
    except SpmdError as error:
        return str(error)
    return ""


def on_rank(world: World) -> list[str]:
    """Ranks prove to each other that they are of one start. The last one then has another key."""
    honest = error_of(lambda: connection_proof.prove(world))
    genuine = connection_proof.STORE_KEY
    if world.rank == world.size - 1:
        connection_proof.STORE_KEY = "another"
    impostor = error_of(lambda: connection_proof.prove(world))
    placements = plan_split({"role": RoleSplit()}, world.size)
    in_a_mesh = error_of(lambda: Meshes(world).build([*placements.values()]))
    connection_proof.STORE_KEY = genuine
    return [honest, impostor, in_a_mesh]


def test_an_impostor_is_found_out() -> None:
    honest, impostor, in_a_mesh = on_ranks(on_rank, 3)[0]
    assert honest == ""
    assert impostor == "another process has taken the place of rank 2 in a connection to rank 0"
    assert in_a_mesh == impostor
