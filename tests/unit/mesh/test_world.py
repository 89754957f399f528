"""The world from torchrun's variables, and the store in which its ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World, open_store


def test_a_process_outside_torchrun_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="spmd-rl run RECIPE"):
        World.from_env()


def test_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RANK": 9,
        "WORLD_SIZE": 16,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 8,
        "GROUP_RANK": 1,
        "MASTER_ADDR": "h",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    world = World.from_env()
    assert (world.rank, world.local_rank, world.node, world.num_nodes) == (9, 1, 1, 2)


def test_ranks_of_one_node_meet_in_a_private_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0/0/error.json"))
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    stores = [open_store(World(rank, 2, rank, 2, 0, "r", 0)) for rank in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    (file,) = tmp_path.glob("*/store")
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_restarts_over_several_nodes_need_fresh_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    world = World(rank=9, size=16, local_rank=1, local_size=8, node=1, run_id="r", restart=0)
    with pytest.raises(
        ConfigError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each node"
    ):
        open_store(world)


def test_ranks_of_one_host_are_neighbours() -> None:
    world = World(rank=1, size=8, local_rank=1, local_size=4, node=0, run_id="r", restart=0)
    assert all(map(world.has_one_host, [(0, 3), (4, 5)]))
    assert not any(map(world.has_one_host, [(3, 4), (0, 4)]))
