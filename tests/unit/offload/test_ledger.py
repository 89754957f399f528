"""The arithmetic of a ledger, against sums worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import PlanError
from spmd_rl.offload.gpu_overhead import Peers, gpu_overhead
from spmd_rl.offload.ledger import Entry, Ledger

PHASES = ("sync", "rollout", "train")


def ledger(*entries: Entry) -> Ledger:
    return Ledger(entries, phases=PHASES)


def test_refusal_shows_the_sum() -> None:
    found = ledger(
        Entry("master", 4 << 30),
        Entry("kv", 6 << 30, ("rollout",)),
        Entry("nothing", 0, ("rollout",)),
    )
    found.require(10 << 30)
    with pytest.raises(
        PlanError,
        match=r"phase rollout needs master 4\.000 GiB \+ kv 6\.000 GiB = 10\.00 GiB, "
        r"and there are 9\.000 GiB",
    ):
        found.require(9 << 30)


rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 1 << 40),
        st.sets(st.sampled_from(PHASES)) | st.none(),
        st.booleans(),
    ),
    max_size=8,
)


@given(rows)
def test_a_phase_has_what_is_in_it_and_the_work_of_one_role(
    found: list[tuple[str, int, set[str] | None, bool]],
) -> None:
    made = ledger(
        *(
            Entry(role, size, None if phases is None else tuple(phases), role, work)
            for role, size, phases, work in found
        )
    )
    for phase in PHASES:
        there = [row for row in found if row[2] is None or phase in row[2]]
        work = [sum(r[1] for r in there if r[3] and r[0] == role) for role in "abc"]
        assert made.resident_bytes(phase) == sum(r[1] for r in there if not r[3]) + max(work)
    assert made.peak_bytes() == max(map(made.resident_bytes, PHASES))


def test_roles_work_in_turn() -> None:
    made = ledger(
        Entry("grads", 5, ("train",), "train", True),
        Entry("activations", 5, ("train",), "train", True),
        Entry("critic activations", 8, ("train", "sync"), "critic", True),
    )
    assert made.resident_bytes("train") == 10
    assert made.resident_bytes("sync") == 8
    assert [entry.tag for entry in made.counted("train")] == ["grads", "activations"]


def test_beside_a_tag() -> None:
    """The worst phase of those in which it is there, whatever its size."""
    narrow = ledger(
        Entry("kv", 5, ("sync", "rollout")), Entry("all", 3), Entry("train", 90, ("train",))
    )
    assert narrow.beside_bytes("kv") == narrow.sized("kv", 10**12).beside_bytes("kv") == 3
    assert narrow.beside_bytes("train") == 3
    assert narrow.beside_bytes("all") == 90
    assert narrow.beside_bytes("nothing") == 0
    assert narrow.sized("kv", 8).resident_bytes("sync") == 11
    assert narrow.sized("nothing", 8) == narrow


def test_host_memory_is_there_all_the_time() -> None:
    made = ledger(Entry("moments", 0, (), host_bytes=7), Entry("master", 5, host_bytes=5))
    assert made.host_bytes() == 12
    assert made.peak_bytes() == 5


def test_what_a_gpu_takes() -> None:
    mib = 1 << 20
    alone, many = (
        {entry.tag: entry.num_bytes for entry in gpu_overhead(*counts, ranks_per_host=8)}
        for counts in ((4, 0, ()), (7, 1, (Peers((0, 1), 1),)))
    )
    assert alone == {"context": 720 * mib, "communicators": (170 + 4 * 196) * mib}
    assert many["communicators"] == (170 + 250 + 7 * 196 + (24 + 32) * 12) * mib


def test_peers_of_other_hosts_share_their_buffers() -> None:
    """Beside two channels to each rank of the same host."""
    mib, host = 1 << 20, tuple(range(8))
    assert Peers(host, 0).num_bytes(8) == 0
    assert Peers(host, 7).num_bytes(8) == 7 * 32 * 12 * mib
    shared = (8 + 1) * 64 * mib
    for num_ranks in (16, 256, 8192):
        every = Peers(tuple(range(num_ranks)), num_ranks - 1)
        assert every.num_bytes(8) == 7 * 2 * 12 * mib + shared
    assert Peers(tuple(range(4, 12)), 1).num_bytes(8) == 2 * 12 * mib + shared
    assert Peers(tuple(range(4, 8)), 3).num_bytes(4) == 3 * 32 * 12 * mib
