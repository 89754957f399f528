"""The arithmetic of memory, against sizes worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import PlanError
from spmd_rl.offload.ledger import (
    PHASES,
    Entry,
    Ledger,
    engine_ledger,
    kv_budget,
    kv_pages,
    kv_token_bytes,
    total,
    trainer_ledger,
)


def test_eight_billion_on_four_gpus() -> None:
    ledger = trainer_ledger(
        8_000_000_000,
        num_shards=4,
        compute_bytes=2,
        num_trained=8_000_000_000,
        moments=2 * 8_000_000_000,
        num_gathered=1_000_000_000,
    )
    assert ledger.resident_bytes("train") == 8_000_000_000 // 4 * 4 * 4 + 2_000_000_000
    assert ledger.resident_bytes("rollout") == 8_000_000_000 // 4 * 4 * 3


def test_single_fp32_rank_has_no_gathered_copy() -> None:
    assert trainer_ledger(10, 1, 4, num_trained=10, moments=80).resident_bytes("train") == 160


def test_kv_of_qwen3_8b() -> None:
    """36 layers, 8 key-value heads of 128, bf16: 144 KiB a token."""
    assert kv_token_bytes(36, 8, 128, 2) == 147_456


def test_refusal_shows_the_sum() -> None:
    trainer = trainer_ledger(1 << 30, 1, 4, num_trained=1 << 30, moments=8 << 30)
    ledger = total([trainer, engine_ledger(1 << 30, 2, 6 << 30)])
    ledger.require(ledger.peak_bytes())
    assert ledger.resident_bytes("sync") == ledger.resident_bytes("rollout"), (
        "a push finds the pages there"
    )
    assert ledger.resident_bytes("train") == 18 << 30, "and gradients take their place"
    with pytest.raises(
        PlanError,
        match=r"phase sync needs master 4\.000 GiB .* kv 6\.000 GiB = 20\.00 GiB.*19\.00 GiB",
    ):
        ledger.require(19 << 30)


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1 << 40), st.booleans()), max_size=6
    )
)
def test_peak_is_the_worst_phase(rows: list[tuple[str, int, bool]]) -> None:
    ledger = Ledger(
        tuple(
            Entry(tag, size, ("train",) if narrow else ("sync", "train"))
            for tag, size, narrow in rows
        )
    )
    assert ledger.peak_bytes() == sum(size for _, size, _ in rows) == ledger.resident_bytes("train")
    assert ledger.resident_bytes("rollout") == 0


def test_an_engine_that_never_sleeps_is_there_in_every_phase() -> None:
    kept, given_back = (
        engine_ledger(10, 2, 100, sleeps=sleeps, step=7) for sleeps in (False, True)
    )
    assert [kept.resident_bytes(phase) for phase in PHASES] == [127, 127, 127]
    assert [given_back.resident_bytes(phase) for phase in PHASES] == [120, 127, 20]


def test_beside_a_tag() -> None:
    """The worst phase of those in which it is there, whatever its size."""
    narrow = Ledger(
        (Entry("kv", 5, ("sync", "rollout")), Entry("all", 3), Entry("train", 90, ("train",)))
    )
    assert narrow.beside_bytes("kv") == narrow.sized("kv", 10**12).beside_bytes("kv") == 3
    assert narrow.beside_bytes("train") == 3
    assert narrow.beside_bytes("all") == 90
    assert narrow.beside_bytes("nothing") == 0
    assert narrow.sized("kv", 8).resident_bytes("sync") == 11
    assert narrow.sized("nothing", 8) == narrow


def test_a_budget_of_pages() -> None:
    assert kv_budget(1000, 0.9, 400) == 500
    assert kv_budget(1000, 0.9, 1000) == -100
    for budget, pages in ((500, 12), (-100, 4), (70, 7), (39, 4)):
        assert kv_pages(5, 2, context=7, batch=3, budget_bytes=budget) == pages
