"""Regions on a CPU, their host memory, and its limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.errors import ConfigError, ResidencyError
from spmd_rl.offload import arena as arena_module
from spmd_rl.offload import tms
from spmd_rl.offload.arena import HostArena
from spmd_rl.offload.host_limit import KEPT_BYTES, host_bytes_left
from spmd_rl.offload.region import GAP_BYTES, SlabRegion, TorchRegion, _ranges
from spmd_rl.offload.regions import Regions
from spmd_rl.offload.residency import Residency

CPU = torch.device("cpu")
TAGS = ("master", "moments", "pages")


class Role:
    """Regions with two saved kinds of tensors and dropped pages, and what they should hold."""

    def __init__(self, host_bytes: int = 0) -> None:
        self.regions = Regions("trainer", CPU, host_bytes)
        self.tensors: dict[str, list[Tensor]] = {}
        for number, tag in enumerate(("master", "moments")):
            region = self.regions.torch_region(tag, "save")
            with region.allocating():
                whole = torch.arange(24.0) + 100 * number
                self.tensors[tag] = [
                    whole.view(4, 6),
                    torch.arange(5, dtype=torch.int32),
                    torch.empty(0),
                    torch.tensor(7.0 + number),
                ]
            region.hold(lambda tag=tag: self.tensors[tag])
        self.pages = self.regions.slab("pages", "drop", 4096).bytes
        self.expected = self.copied()

    def copied(self) -> dict[str, list[Tensor]]:
        return {tag: [one.clone() for one in tensors] for tag, tensors in self.tensors.items()}

    def change(self, tag: str) -> None:
        self.regions.note_change(tag)
        for tensor in self.tensors[tag]:
            tensor += 1
        self.expected[tag] = [tensor.clone() for tensor in self.tensors[tag]]

    def check(self, tag: str) -> None:
        assert same(self.tensors[tag], self.expected[tag])


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_a_tensor_has_no_memory_while_it_sleeps() -> None:
    role = Role()
    receipt = role.regions.sleep(["master"])
    assert role.tensors["master"][0].untyped_storage().nbytes() == 0
    assert receipt.before["master"] == 24 * 4 + 5 * 4 + 4
    assert receipt.after["master"] == 0
    assert receipt.after["moments"] == receipt.before["moments"]


def test_unchanged_contents_are_copied_once() -> None:
    role = Role()
    first = role.regions.sleep(["master"])
    role.regions.wake(["master"])
    second = role.regions.sleep(["master"])
    role.regions.wake(["master"])
    role.change("master")
    third = role.regions.sleep(["master"])
    assert first.copied_bytes == third.copied_bytes == 24 * 4 + 5 * 4 + 4
    assert second.copied_bytes == 0


def test_what_sleeps_cannot_change() -> None:
    role = Role()
    role.regions.sleep(["moments"])
    with pytest.raises(ResidencyError, match="'moments' is asleep: it cannot change"):
        role.regions.note_change("moments")


def test_a_change_after_a_save_is_saved_again() -> None:
    role = Role()
    role.regions.begin_save(["master"])
    role.change("master")
    role.regions.sleep(["master"])
    role.regions.wake(["master"])
    role.check("master")


def test_host_memory_is_refused_before_anything_sleeps() -> None:
    role = Role(host_bytes=64)
    with pytest.raises(ResidencyError, match="offload.host_gib leave 64"):
        role.regions.sleep()
    assert all(role.regions.is_awake(tag) for tag in TAGS)
    role.check("master")
    assert role.regions.host_bytes == 0


def test_two_regions_of_one_tag_are_refused() -> None:
    role = Role()
    with pytest.raises(ResidencyError, match="already"):
        role.regions.torch_region("master", "drop")


def test_a_slab_is_replaced() -> None:
    role = Role()
    slab = role.regions.slab("pages", "drop", 128)
    assert isinstance(slab, SlabRegion)
    assert slab.bytes.numel() == role.regions["pages"].num_bytes == 128


def test_illegal_edges_are_refused() -> None:
    residency = Residency("kv")
    with pytest.raises(ResidencyError, match="memory 'kv' is awake, so it cannot become loading"):
        residency.move("loading")
    assert residency.state == "awake"


def test_parts_of_one_storage_sleep_once() -> None:
    regions = Regions("engine", CPU)
    region = regions.torch_region("weights", "save")
    whole = torch.arange(8.0)
    parts = [whole[:3], whole[3:]]
    region.hold(lambda: parts)
    assert isinstance(region, TorchRegion)
    assert region.num_bytes == 32
    regions.sleep()
    regions.wake()
    assert torch.equal(whole, torch.arange(8.0))


def test_limit_of_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lesser of what the cgroup and the machine leave, shared by the ranks of the machine."""
    job, own, meminfo = tmp_path / "job", tmp_path / "own", tmp_path / "meminfo"
    (job / "step").mkdir(parents=True)
    own.write_text("0::/job/step\n")
    (job / "memory.max").write_text(f"{KEPT_BYTES + 3000}\n")
    (job / "memory.current").write_text("1500\n")
    (job / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    (job / "step" / "memory.max").write_text("max\n")
    (job / "step" / "memory.current").write_text("7\n")
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable: 99999999999 kB\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert host_bytes_left(tmp_path, own, meminfo) == 1000
    (job / "memory.max").write_text("max\n")
    meminfo.write_text(f"MemAvailable: {(KEPT_BYTES >> 10) + 4} kB\n")
    assert host_bytes_left(tmp_path, own, meminfo) == 2048


def test_limit_of_a_cgroup_in_version_1(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    own.write_text("5:cpu,cpuacct:/else\n4:memory:/job\n")
    (folder / "memory.limit_in_bytes").write_text(f"{KEPT_BYTES + 300}\n")
    (folder / "memory.usage_in_bytes").write_text("100\n")
    assert host_bytes_left(tmp_path, own, tmp_path / "none") == 200
    assert host_bytes_left(tmp_path, tmp_path / "none", tmp_path / "none") == 0


def test_numbers_of_a_list_of_processors() -> None:
    assert list(arena_module._numbers("0-2,7")) == [0, 1, 2, 7]


def test_host_memory_goes_back_with_its_last_tensor() -> None:
    arena = HostArena(CPU, 1000)
    memory = arena.reserve(700)
    part = memory[100:].view(torch.float32)
    with pytest.raises(ResidencyError, match="beside 700 B .* leave 300 B"):
        arena.reserve(301)
    del memory
    assert arena.num_bytes == 700
    assert not part.any()
    del part
    assert arena.num_bytes == 0
    assert arena.reserve(1000).numel() == 1000


def test_roles_of_a_rank_share_a_limit() -> None:
    first, second = (Regions(name, CPU, 1 << 20) for name in ("trainer", "reference"))
    first.slab("weights", "save", 1 << 19).bytes.zero_()
    first.reserve_saves()
    second.slab("weights", "save", (1 << 19) + 1).bytes.zero_()
    with pytest.raises(ResidencyError, match="offload.host_gib"):
        second.reserve_saves()
    assert (first.host_bytes, second.host_bytes) == (1 << 19, 0)
    del first
    second.reserve_saves()
    assert second.host_bytes == (1 << 19) + 1


def test_host_memory_is_taken_once() -> None:
    role = Role()
    role.regions.reserve_saves()
    addresses = [role.regions[tag]._host for tag in ("master", "moments")]
    for _ in range(3):
        role.change("master")
        role.regions.sleep()
        role.regions.wake()
    assert [role.regions[tag]._host for tag in ("master", "moments")] == addresses
    assert role.regions["pages"].host_bytes == 0


def test_nothing_is_allocated_in_what_sleeps() -> None:
    regions = Regions("trainer", CPU)
    region = regions.torch_region("moments", "save")
    tensors: list[Tensor] = []
    region.hold(lambda: tensors)
    regions.sleep()
    with (
        pytest.raises(ResidencyError, match="'moments' is asleep: it cannot allocate"),
        region.allocating(),
    ):
        tensors.append(torch.ones(3))
    regions.wake()
    with region.allocating():
        tensors.append(torch.ones(3))
    regions.sleep()
    regions.wake()
    assert tensors[0].tolist() == [1, 1, 1]


def blocks(*sizes: int) -> list[dict[str, object]]:
    """Blocks of torch's allocator; those of negative size are free."""
    return [
        {"size": abs(size), "state": "active_allocated" if size > 0 else "inactive"}
        for size in sizes
    ]


def test_blocks_in_use_are_joined_within_a_segment() -> None:
    gap = GAP_BYTES
    segments = [
        {"address": 1000, "blocks": blocks(512, -gap, 512, -gap - 512, 1024, -512)},
        {"address": 1 << 30, "blocks": blocks(-512, 512)},
        {"address": (1 << 30) + 1024, "blocks": blocks(512)},
        {"address": 1 << 31, "blocks": blocks(-4096)},
    ]
    joined = 1000 + 512 + gap + 512
    assert list(_ranges(segments)) == [
        (1000, joined),
        (joined + gap + 512, joined + gap + 512 + 1024),
        ((1 << 30) + 512, (1 << 30) + 1024),
        ((1 << 30) + 1024, (1 << 30) + 1536),
    ]


class OnGpu:
    """A tensor of a GPU, as far as its place goes."""

    is_cuda, nbytes = True, 64

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return 16


@pytest.mark.parametrize(("address", "inside"), [(1000, True), (1999, True), (2000, False)])
def test_a_tensor_that_was_made_elsewhere_is_refused(address: int, inside: bool) -> None:
    region = TorchRegion("moments", "save", CPU, "trainer.moments")
    region.hold(lambda: [OnGpu(address), torch.ones(1)])  # type: ignore[list-item]
    if inside:
        region._require_within([(1000, 2000), (3000, 4000)])
        return
    with pytest.raises(ResidencyError, match="64 B belongs to memory 'moments' and was not"):
        region._require_within([(1000, 2000), (3000, 4000)])


def test_too_little_memory_is_refused_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    role = Role()
    role.regions.sleep()
    states = {tag: role.regions[tag].residency.state for tag in TAGS}
    role.regions._device = torch.device("cuda")
    monkeypatch.setattr("spmd_rl.offload.regions.free_bytes", lambda device, wanted: 1 << 20)
    with pytest.raises(ResidencyError) as caught:
        role.regions._map_all([role.regions[tag] for tag in TAGS])
    assert "trainer needs 32.00 MiB to wake (master 120 B and moments 120 B and pages" in str(
        caught.value
    )
    assert "the GPU has 1.000 MiB left" in str(caught.value)
    assert {tag: role.regions[tag].residency.state for tag in TAGS} == states


def test_expandable_segments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    tms._saver.cache_clear()
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF asks for expandable segments"):
        tms.unmap("x")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    tms._saver.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[gpu\]' in the repository"):
        tms.unmap("x")
