"""Memory of a role: which tags have a region, and host memory that is refused in advance."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.phases import ALL, RoleSleep
from spmd_rl.offload.region import segment_bytes
from spmd_rl.offload.role_memory import RoleMemory

CPU = torch.device("cpu")
PHASES = {"rollout": ("master",), "train": ALL}


def memory_of(
    tag: str, host_bytes: int = 0, always: bool = False
) -> tuple[RoleMemory, torch.Tensor]:
    memory = RoleMemory(RoleSleep("train", PHASES, host_bytes), CPU)
    with memory.allocating(tag, always=always):
        tensor = torch.ones(100)
    memory.hold(tag, lambda: [tensor])
    return memory, tensor


def test_what_every_phase_keeps_awake_has_no_region() -> None:
    memory, tensor = memory_of("master")
    (receipt,) = memory.sleep()
    assert receipt.before == {}
    assert memory.is_awake("master")
    assert tensor.sum() == 100


def test_what_some_phase_lets_sleep_has_one() -> None:
    for memory, tensor in (memory_of("moments"), memory_of("master", always=True)):
        (receipt,) = memory.sleep()
        assert list(receipt.before.values()) == [400]
        assert not tensor.untyped_storage().nbytes()
        memory.wake()
        assert tensor.sum() == 100


def test_a_host_with_too_little_is_refused_before_anything_sleeps() -> None:
    memory, tensor = memory_of("moments", host_bytes=399)
    with pytest.raises(ResidencyError, match="offload.host_gib leave 399"):
        memory.reserve_saves()
    assert tensor.sum() == 100
    memory_of("moments", host_bytes=400)[0].reserve_saves()
    memory_of("master", host_bytes=10)[0].reserve_saves()


def test_one_segment_holds_large_tensors_alone() -> None:
    assert segment_bytes([1 << 20, 100, (1 << 20) + 1, 4 << 20]) == (1 << 20) + 512 + (4 << 20)
