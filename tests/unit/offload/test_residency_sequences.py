"""Any sequence of sleeps, wakes and failures on a CPU: contents, states and receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.host import HostMemory
from spmd_rl.offload.region import Region, SlabRegion
from spmd_rl.offload.regions import Regions
from spmd_rl.offload.residency import EDGES, Receipt, Residency, State

CPU = torch.device("cpu")
SAVED = ("master", "moments", "weights")
TAGS = (*SAVED, "kv")
POISON, PAGE = 0xA5, 0x11
EDGE_CALLS = {"save": "begin_save", "unmap": "unmap", "map": "map", "load": "begin_load"}
Tags = tuple[str, ...]


class Role:
    """A role with two regions of torch and two slabs, beside the contents that each should have."""

    def __init__(self) -> None:
        self.regions = Regions("role", CPU)
        self.bytes: dict[str, Tensor] = {}
        for number, tag in enumerate(("master", "moments")):
            region = self.regions.torch_region(tag, "save")
            with region.allocating():
                values = torch.arange(40.0) + 1000 * number
            tensors = [values[:8].view(2, 4), values[8:]]
            region.hold(lambda tensors=tensors: tensors)
            self.bytes[tag] = values.view(torch.uint8)
        self.bytes["weights"] = self.regions.slab("weights", "save", 5000).bytes
        self.bytes["weights"].copy_(torch.arange(5000).to(torch.uint8))
        self.bytes["kv"] = self.regions.slab("kv", "drop", 4096).bytes.fill_(PAGE)
        self.expected = {tag: self.bytes[tag].clone() for tag in SAVED}

    def state(self, tag: str) -> State:
        return self.regions[tag].residency.state

    def states(self) -> dict[str, State]:
        return {tag: self.state(tag) for tag in TAGS}

    def sleep(self, tags: Tags) -> None:
        before = self.states()
        receipt = self.regions.sleep(tags)
        self.check_receipt(receipt, {tag for tag in tags if before[tag] != "asleep"}, set())
        assert all(self.state(tag) == "asleep" for tag in tags)

    def wake(self, tags: Tags, late: Tags = ()) -> None:
        before = self.states()
        receipt = self.regions.wake(tags, late)
        woken = {tag for tag in tags if before[tag] == "asleep"}
        self.check_receipt(receipt, set(), woken)
        assert receipt.copied_bytes == sum(self.bytes[tag].numel() for tag in woken & {*SAVED})
        for tag in woken & {*SAVED}:
            assert self.state(tag) == ("loading" if tag in late else "awake")
        if "kv" in woken:
            assert (self.bytes["kv"] == POISON).all(), "dropped contents came back"
            self.bytes["kv"].fill_(PAGE)

    def check_receipt(self, receipt: Receipt, slept: set[str], woken: set[str]) -> None:
        """Each region is counted once, with all of its bytes or none."""
        sizes = {tag: self.bytes[tag].numel() for tag in TAGS}
        for tag in TAGS:
            change = receipt.after[tag] - receipt.before[tag]
            assert change == sizes[tag] * ((tag in woken) - (tag in slept))
        assert sum(receipt.after.values()) == sum(
            sizes[tag] for tag in TAGS if self.state(tag) != "asleep"
        )
        assert min(receipt.map_s, receipt.copy_s, receipt.exposed_s) >= 0

    def arrive(self, tags: Tags) -> None:
        for tag in tags:
            self.regions.wait_loaded(tag)

    def change(self, tags: Tags) -> None:
        for tag in set(tags) & {*SAVED}:
            if self.regions.is_awake(tag):
                self.regions.note_change(tag)
                self.bytes[tag] += 1
                self.expected[tag] = self.bytes[tag].clone()
            else:
                with pytest.raises(ResidencyError, match="cannot change"):
                    self.regions.note_change(tag)

    def fail(self, edge: str, tags: Tags) -> None:
        """Have the last region that takes an edge fail there."""
        failing = [tag for tag in dict.fromkeys(tags) if self.takes(edge, tag)]
        if not failing:
            return
        region, before = self.regions[failing[-1]], self.states()
        setattr(region, EDGE_CALLS[edge], refuse)
        act = self.regions.sleep if edge in ("save", "unmap") else self.regions.wake
        with pytest.raises(ResidencyError, match="the test refuses"):
            act(tags)
        delattr(region, EDGE_CALLS[edge])
        if edge in ("map", "load"):
            assert self.states() == before, "a failed wake leaves the old state"
        elif edge == "save":
            assert all(self.state(tag) != "asleep" for tag in tags if before[tag] != "asleep")
        else:
            assert self.state(failing[-1]) == "awake"

    def takes(self, edge: str, tag: str) -> bool:
        """Whether a sleep or wake of `tag` would call what is named by `edge`."""
        region = self.regions[tag]
        if edge == "save":
            return self.state(tag) in ("awake", "loading") and region.contents == "save"
        if edge == "unmap":
            return region.residency.is_mapped
        return not region.residency.is_mapped and (edge == "map" or region.is_saved)

    def check(self) -> None:
        for tag in SAVED:
            if self.regions.is_awake(tag):
                assert torch.equal(self.bytes[tag], self.expected[tag]), tag
        if self.regions.is_awake("kv"):
            assert (self.bytes["kv"] == PAGE).all()


def refuse(*arguments: Any) -> None:
    raise ResidencyError("the test refuses")


def poison(memory: HostMemory, unmap: Callable[[HostMemory], None] = HostMemory.unmap) -> None:
    memory.bytes.fill_(POISON)
    unmap(memory)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that sleeps is written over, so that nothing survives but by a copy."""
    monkeypatch.setattr(HostMemory, "unmap", poison)


some_tags = st.lists(st.sampled_from(TAGS), max_size=4).map(tuple)
actions = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(("sleep", "wake", "late", "arrive", "early", "change")), some_tags
        ),
        st.tuples(st.sampled_from(tuple(EDGE_CALLS)), some_tags),
    ),
    max_size=16,
)


def play(steps: Sequence[tuple[str, Tags]]) -> Iterator[Role]:
    """Yield the role after each step, and at last with all of its memory awake."""
    role = Role()
    acts: dict[str, Callable[[Tags], None]] = {
        "sleep": role.sleep,
        "wake": role.wake,
        "late": lambda tags: role.wake(tags, late=tags),
        "arrive": role.arrive,
        "early": lambda tags: role.regions.begin_save(tags),
        "change": role.change,
    }
    for what, tags in steps:
        if what in EDGE_CALLS:
            role.fail(what, tags)
        else:
            acts[what](tags)
        yield role
    role.wake(TAGS)
    role.arrive(TAGS)
    assert all(state in ("awake", "saving") for state in role.states().values())
    yield role


@settings(max_examples=150, deadline=None)
@given(actions)
def test_contents_survive_any_sequence(steps: list[tuple[str, Tags]]) -> None:
    check_all(steps)


def check_all(steps: Sequence[tuple[str, Tags]]) -> None:
    for role in play(steps):
        role.check()


@pytest.mark.parametrize("tag", SAVED)
def test_a_skipped_save_is_found(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a region that claims to be saved, and is not."""
    whole = Region.begin_save

    def skip(region: Region, arena: Any) -> None:
        whole(region, arena)
        if region.tag == tag:
            for _, host in region._saved:
                host.zero_()

    monkeypatch.setattr(Region, "begin_save", skip)
    with pytest.raises(AssertionError, match=tag):
        check_all([("sleep", TAGS)])


def test_dropped_contents_that_survive_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlabRegion, "unmap", lambda region: None)
    with pytest.raises(AssertionError, match="dropped contents came back"):
        list(play([("sleep", ("kv",))]))


@pytest.mark.parametrize("state", EDGES)
def test_only_legal_edges_are_taken(state: State) -> None:
    for to in EDGES:
        residency = Residency("kv")
        residency.state = state
        if to in EDGES[state]:
            residency.move(to)
            assert residency.state == to
        else:
            with pytest.raises(ResidencyError, match=f"'kv' is {state}, so it cannot become {to}"):
                residency.move(to)
            assert residency.state == state
