"""Numeric contracts: their record, and the clause that says how two differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd_rl.controller.contracts import (
    CONTRACT_FILE,
    by_digest,
    disagreement,
    not_promised,
    record_contracts,
)
from spmd_rl.errors import ContractError, DataError
from tests.unit.observe.damaged import DAMAGED


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CONTRACT_FILE).write_bytes(content)
    with pytest.raises(DataError, match=CONTRACT_FILE):
        record_contracts(tmp_path, "trainer", {"a": {"torch": "2.11"}}, exact=True)


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
        "torch is '2.11' in the first and '2.13' in the second; "
        "isa is None in the first and 'AVX2' in the second"
    )


def test_what_is_followed_has_a_digest_of_its_facts() -> None:
    facts = {"torch": "2.11", "threads": 2}
    first, other = by_digest(
        {"a on rank 0": facts, "b on rank 0": facts | {"threads": 3}, "a on rank 1": dict(facts)}
    )
    assert (first["by"], first["facts"]) == (["a on rank 0", "a on rank 1"], facts)
    assert (other["by"], other["facts"]["threads"]) == (["b on rank 0"], 3)
    (turned,) = by_digest({"a": dict(reversed(facts.items()))})
    assert turned["digest"] == first["digest"] != other["digest"]


def test_where_no_bits_are_promised_is_said_once() -> None:
    gpu = {
        "attention": "keys in ascending blocks, not compared",
        "linear": "library, no promise",
        "threads": 2,
    }
    assert not_promised({"a": {"linear": "library", "threads": 2}}) == ""
    clause = (
        "attention is 'keys in ascending blocks, not compared'; linear is 'library, no promise'"
    )
    assert not_promised({"a": gpu, "b": dict(gpu)}) == clause
    newer = {"attention": "flash-attn-4 4.1 causal, one split, version not compared", "threads": 2}
    assert not_promised({"a": newer}) == f"attention is '{newer['attention']}'"


def test_contracts_of_roles_and_links_stand_beside_each_other(tmp_path: Path) -> None:
    roles = {
        "train": {"train on rank 0": {"threads": 1}},
        "infer": {"infer on rank 0": {"threads": 2}},
    }
    for name, parties in roles.items():
        record_contracts(tmp_path, name, parties, exact=True)
    with pytest.raises(
        ContractError, match=r"threads is 1 in the first and 2 in the second \(give both"
    ):
        record_contracts(tmp_path, "train->infer", roles["train"] | roles["infer"], exact=True)
    assert json.loads((tmp_path / CONTRACT_FILE).read_text()).keys() == roles.keys()
    record_contracts(tmp_path, "train->infer", roles["train"] | roles["infer"], exact=False)
    assert len(json.loads((tmp_path / CONTRACT_FILE).read_text())["train->infer"]) == 2
