from __future__ import annotations

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World


def test_a_process_outside_torchrun_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="spmd-rl run RECIPE"):
        World.from_env()


def test_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": 9, "WORLD_SIZE": 16, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 8, "GROUP_RANK": 1, "MASTER_ADDR": "h"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    world = World.from_env()
    assert (world.rank, world.local_rank, world.node, world.num_nodes) == (9, 1, 1, 2)
