"""Sleep and wake on a GPU: addresses, bytes, graphs, returned memory, copies beside computation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.copies import CHUNK_BYTES
from spmd_rl.offload.region import Region
from tests.gpu.offload.conftest import MIB, Role, addresses, cached_bytes, free_bytes

MakeRole = Callable[..., Role]
HALF_A_SECOND = 900_000_000  # cycles


@pytest.mark.parametrize("as_one", [False, True])
def test_addresses_and_bytes_are_as_before(make_role: MakeRole, as_one: bool) -> None:
    role = make_role(slab="save", slab_bytes=CHUNK_BYTES + 4 * MIB, as_one=as_one)
    before, places = role.digests(), addresses([*role.tensors, role.kv])
    for _ in range(2):
        role.cycle()
        assert addresses([*role.tensors, role.kv]) == places
        assert role.digests() == before
        role.tensors[0].add_(1)
        role.kv[0] += 1
        for tag in ("master", "kv"):
            role.regions.note_change(tag)
        before = role.digests()


@pytest.mark.alone
def test_a_skipped_save_is_seen(make_role: MakeRole, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the memory that comes back is not the memory that went."""
    role = make_role()
    before = role.digests()
    monkeypatch.setattr(Region, "is_saved", property(lambda region: True))
    role.regions.sleep()
    hog = torch.full((free_bytes() - 1024 * MIB,), 0x5A, dtype=torch.uint8, device="cuda")
    del hog
    torch.cuda.empty_cache()
    role.regions.wake()
    assert role.digests()[:-1] != before[:-1]


def test_few_copies_carry_many_tensors(make_role: MakeRole) -> None:
    role = make_role(num_small=600)
    assert len(role.master.pieces()) <= 20 + 10
    whole = make_role(num_small=600, as_one=True)
    small_segments = 600 * 8 // 2048 + 1
    assert len(whole.master.pieces()) <= small_segments + 2


def test_a_graph_replays_with_the_same_bits(make_role: MakeRole) -> None:
    role = make_role(slab="save")
    result = torch.empty(1024, device="cuda")

    def compute() -> None:
        result.copy_(role.tensors[-1].view(1024, 1024).sum(0))
        result.add_(role.kv.view(1024, -1).float().mean(1))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    graph.replay()
    expected = result.clone()
    for _ in range(3):
        role.cycle()
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
    role.tensors[-1][0] += 1
    graph.replay()
    assert not torch.equal(result, expected), "the graph reads the region"


@pytest.mark.alone
def test_almost_all_memory_is_given_back(make_role: MakeRole) -> None:
    cached_before = cached_bytes()
    role = make_role(num_large=128, slab_bytes=1024 * MIB)
    cached = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    awake = free_bytes()
    del cached
    receipt = role.regions.sleep()
    held = sum(receipt.before.values())
    returned = torch.cuda.mem_get_info()[0] - awake - 256 * MIB
    assert returned >= 0.99 * held
    assert receipt.after == {"master": 0, "kv": 0}
    free_before, free_after = receipt.free_bytes
    assert free_after - free_before == pytest.approx(returned + 256 * MIB, abs=4 * MIB)
    assert receipt.residue["torch_cache"] < cached_before + 128 * MIB
    role.regions.wake()
    assert free_bytes() == pytest.approx(awake + 256 * MIB, abs=4 * MIB)


@pytest.mark.alone
def test_twenty_cycles_keep_digests_and_memory(make_role: MakeRole) -> None:
    role = make_role(slab="save")
    before = role.digests()
    role.cycle()
    free, host = free_bytes(), role.regions.host_bytes
    for _ in range(20):
        role.regions.note_change("master")
        role.cycle()
        assert role.digests() == before
    assert free_bytes() >= free - 4 * MIB
    assert role.regions.host_bytes == host


@pytest.mark.alone
def test_a_wake_without_memory_leaves_all_asleep(make_role: MakeRole) -> None:
    role = make_role(num_large=64, slab="save", slab_bytes=512 * MIB)
    before = role.digests()
    role.regions.sleep()
    competing = torch.empty(free_bytes() - 300 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(ResidencyError, match=r"role needs .* \(master .* and kv 512.0 MiB, and"):
        role.regions.wake()
    assert not any(role.regions[tag].residency.is_mapped for tag in ("master", "kv"))
    del competing
    role.regions.wake()
    assert role.digests() == before


@pytest.mark.alone
@pytest.mark.parametrize("call", ["map", "begin_load"])
def test_a_wake_that_fails_midway_is_undone(make_role: MakeRole, call: str) -> None:
    role = make_role(slab="save")
    before = role.digests()
    role.regions.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    failing = role.regions["master"]  # it comes after the slab

    def refuse() -> None:
        raise ResidencyError("the test refuses")

    setattr(failing, call, refuse)
    with pytest.raises(ResidencyError, match="the test refuses"):
        role.regions.wake(["kv", "master"])
    delattr(failing, call)
    assert torch.cuda.mem_get_info()[0] >= asleep - 4 * MIB
    role.regions.wake()
    assert role.digests() == before


@pytest.mark.alone
def test_copies_run_beside_computation(make_role: MakeRole) -> None:
    role = make_role(num_large=256)
    role.cycle()
    before = role.digests()
    role.regions.note_change("master")
    role.regions.begin_save(["master"])
    torch.cuda._sleep(HALF_A_SECOND)
    asleep = role.regions.sleep()
    assert asleep.copied_bytes >= 1024 * MIB
    assert asleep.exposed_s < 0.1 * asleep.copy_s
    awake = role.regions.wake(in_background=["master"])
    assert awake.exposed_s == 0
    assert role.regions["master"].residency.state == "loading"
    role.regions.wait_loaded("master")
    assert role.digests() == before


def test_dropped_contents_are_not_copied(make_role: MakeRole) -> None:
    role = make_role(contents="drop", slab="drop")
    asleep, awake = role.regions.sleep(), role.regions.wake()
    assert asleep.copied_bytes == awake.copied_bytes == role.regions.host_bytes == 0


def test_a_tensor_from_outside_is_refused(make_role: MakeRole) -> None:
    role = make_role()
    role.tensors.append(torch.ones(1 << 20, device="cuda"))
    with pytest.raises(ResidencyError, match="4.000 MiB belongs to memory 'master' and was not"):
        role.regions.sleep()
    assert role.regions.is_awake("master")


def test_more_than_there_is_cannot_be_allocated(make_role: MakeRole) -> None:
    role = make_role()
    total = torch.cuda.mem_get_info()[1]
    with (
        pytest.raises(ResidencyError, match="are asked for, and the GPU has"),
        role.master.allocating(total),
    ):
        pass


PROGRAM = """
import torch
from tests.gpu.offload.conftest import Role
role = Role()
role.cycle()
{end}
"""


@pytest.mark.parametrize("end", ["", "del role", "role.regions.sleep()"])
def test_the_process_ends_with_code_0(make_role: MakeRole, end: str) -> None:
    """torch_memory_saver ends a process with code 1 that frees its pools outside a region."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
