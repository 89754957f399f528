"""Who follows which numeric contract, and how a difference is told."""

from __future__ import annotations

from spmd_rl.controller.link import disagreement


def test_equal_contracts_say_nothing() -> None:
    assert disagreement({}) == ""
    facts = {"torch": "2.11", "threads": 2}
    assert disagreement({"a on rank 0": facts, "b on rank 1": dict(facts)}) == ""


def test_the_first_difference_is_named_with_both_values() -> None:
    contracts = {
        "trainer on rank 0": {"torch": "2.11", "dtype": "bfloat16"},
        "rollout on rank 0": {"torch": "2.11", "dtype": "bfloat16"},
        "rollout on rank 1": {"torch": "2.13", "dtype": "bfloat16", "isa": "AVX2"},
    }
    assert disagreement(contracts) == (
        "trainer on rank 0 and rollout on rank 1 follow different numeric contracts: "
        "torch is '2.11' here and '2.13' there; isa is None here and 'AVX2' there"
    )
