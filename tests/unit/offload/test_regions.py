"""Regions on a CPU: contents over any legal sequence of sleeps and wakes, receipts, failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload import arena as arena_module
from spmd_rl.offload.host_limit import KEPT_BYTES, host_bytes_left
from spmd_rl.offload.region import Region, SlabRegion, TorchRegion
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


def some_tags() -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(TAGS), max_size=3).map(tuple)


ACTIONS = st.one_of(
    st.tuples(st.just("sleep"), some_tags()),
    st.tuples(st.just("wake"), some_tags()),
    st.tuples(st.just("late"), some_tags()),
    st.tuples(st.just("save"), some_tags()),
    st.tuples(st.just("change"), st.sampled_from(("master", "moments")).map(lambda tag: (tag,))),
    st.tuples(st.just("fail"), some_tags()),
)


def act(role: Role, what: str, tags: tuple[str, ...]) -> None:
    regions = role.regions
    if what == "sleep":
        receipt = regions.sleep(tags)
        asleep = [tag for tag in tags if receipt.before[tag]]
        given_back = sum(receipt.before.values()) - sum(receipt.after.values())
        assert given_back == sum(receipt.before[tag] for tag in set(asleep))
    elif what == "wake":
        receipt = regions.wake(tags)
        assert all(receipt.after[tag] == regions[tag].num_bytes for tag in tags)
    elif what == "late":
        regions.wake(tags, in_background=tags)
        for tag in tags:
            regions.wait_loaded(tag)
    elif what == "save":
        regions.begin_save(tags)
    elif what == "change" and regions.is_awake(tags[0]):
        role.change(tags[0])
    elif what == "fail":
        fail_to_wake(role, tags)


def fail_to_wake(role: Role, tags: tuple[str, ...]) -> None:
    """Have the last region of a wake fail, and see that nothing is awake that slept."""
    asleep = [tag for tag in dict.fromkeys(tags) if not role.regions[tag].residency.is_mapped]
    if not asleep:
        return
    region = role.regions[asleep[-1]]

    def refuse() -> None:
        raise ResidencyError("the GPU has too little left")

    region.map = refuse  # type: ignore[method-assign]
    with pytest.raises(ResidencyError, match="too little left"):
        role.regions.wake(tags)
    del region.map  # type: ignore[method-assign]
    assert not any(role.regions[tag].residency.is_mapped for tag in asleep)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=12))
def test_contents_survive_any_sequence(actions: list[tuple[str, tuple[str, ...]]]) -> None:
    role = Role()
    for what, tags in actions:
        act(role, what, tags)
        for tag in ("master", "moments"):
            if role.regions.is_awake(tag):
                role.check(tag)
    role.regions.wake()
    role.check("master")
    role.check("moments")


def test_a_save_that_is_skipped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property test would fail where contents do not travel."""
    role = Role()
    monkeypatch.setattr(Region, "is_saved", property(lambda self: True))
    role.regions.sleep()
    role.regions.wake()
    assert not same(role.tensors["master"], role.expected["master"])


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
