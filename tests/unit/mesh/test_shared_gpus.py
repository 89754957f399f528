"""The GPU of each rank of a host, and what NCCL is told where ranks share one."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.shared_gpus import (
    RANKS_PER_GPU_ENV,
    gpu_of,
    ranks_per_gpu,
    refuse_shared_gpus,
    variables_of_sharing,
)
from spmd_rl.mesh.world import World


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANKS_PER_GPU_ENV, raising=False)


def test_each_rank_has_the_gpu_of_its_number() -> None:
    assert [gpu_of(rank, 3, 4) for rank in range(3)] == [0, 1, 2]


def test_more_ranks_than_gpus_are_refused_with_the_setting_that_allows_them() -> None:
    with pytest.raises(ConfigError, match=f"5 ranks .* 2 GPUs .*{RANKS_PER_GPU_ENV}=3 to try"):
        gpu_of(0, 5, 2)
    with pytest.raises(ConfigError, match="1 GPU of this host"):
        gpu_of(0, 2, 1)


def test_ranks_are_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_GPU_ENV, "3")
    assert Counter(gpu_of(rank, 5, 2) for rank in range(5)) == {0: 3, 1: 2}
    with pytest.raises(ConfigError, match=f"{RANKS_PER_GPU_ENV}=4"):
        gpu_of(0, 7, 2)


def test_what_needs_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_shared_gpus("an engine")
    monkeypatch.setenv(RANKS_PER_GPU_ENV, "2")
    with pytest.raises(ConfigError, match=f"an engine needs a GPU .*{RANKS_PER_GPU_ENV}"):
        refuse_shared_gpus("an engine")


@pytest.mark.parametrize("text", ["0", "two", "-1", ""])
def test_what_is_no_number_of_ranks_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_GPU_ENV, text)
    with pytest.raises(ConfigError, match=RANKS_PER_GPU_ENV):
        ranks_per_gpu()


@pytest.mark.parametrize(("num_ranks", "num_gpus"), [(2, 1), (4, 1), (4, 2), (5, 2), (8, 4)])
def test_no_two_ranks_of_a_gpu_are_on_one_host_for_nccl(num_ranks: int, num_gpus: int) -> None:
    """Those of different GPUs may be."""
    places = {
        (variables_of_sharing("host", rank, num_gpus, True)["NCCL_HOSTID"], rank % num_gpus)
        for rank in range(num_ranks)
    }
    assert len(places) == num_ranks
    assert len({host for host, _ in places}) == -(-num_ranks // num_gpus)


def test_hosts_have_ids_of_their_own_and_their_network() -> None:
    here, there = (variables_of_sharing(host, 0, 1, False) for host in ("run 0", "run 1"))
    assert here["NCCL_HOSTID"] != there["NCCL_HOSTID"]
    assert "NCCL_SOCKET_IFNAME" not in here
    assert variables_of_sharing("run 0", 0, 1, True)["NCCL_SOCKET_IFNAME"] == "lo"


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(rank=3, size=4, local_rank=3, local_size=4, node=0, run_id="r", restart=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert world.own_device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="4 ranks"):
        _ = world.own_device
    monkeypatch.setitem(os.environ, RANKS_PER_GPU_ENV, "2")
    assert world.own_device == torch.device("cuda", 1)
