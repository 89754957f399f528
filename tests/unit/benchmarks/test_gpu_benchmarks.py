"""Host side of benchmarks: shapes, promises, equal work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.grpo_proof import broken_promises
from benchmarks.laptop_vs_trl import _check_equal
from benchmarks.shapes import write_config
from spmd_rl.controller.contracts import CONTRACT_FILE, by_digest


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("4B", 4.022), ("8B", 8.191)])
def test_shapes_are_those_of_qwen3(tmp_path: Path, name: str, billions: float) -> None:
    spec = write_config(name, tmp_path / name)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        (
            {"linear": "library, no promise"},
            ["follow different numeric contracts: linear", "'library, no promise'"],
        ),
        (
            {"dtype": "torch.float32"},
            ["follow different numeric contracts: dtype", "rollout computes in torch.float32"],
        ),
    ],
)
def test_a_proof_without_a_promise_is_seen(
    tmp_path: Path, other: dict[str, str], said: list[str]
) -> None:
    facts = {"dtype": "torch.bfloat16", "linear": "one ascending chain"}
    kept = by_digest({"trainer": facts, "rollout": facts | other})
    (tmp_path / CONTRACT_FILE).write_text(json.dumps({"trainer->rollout": kept}))
    broken = broken_promises(tmp_path)
    assert len(broken) == len(said)
    assert all(
        clause.startswith("trainer->rollout: ") and part in clause
        for clause, part in zip(broken, said, strict=True)
    )


def test_a_proof_without_a_link_is_seen(tmp_path: Path) -> None:
    kept = by_digest({"trainer on rank 0": {"dtype": "torch.bfloat16"}})
    (tmp_path / CONTRACT_FILE).write_text(json.dumps({"trainer": kept}))
    assert broken_promises(tmp_path) == ["no link kept what its ends follow"]


def test_unequal_work_is_refused() -> None:
    ours = {"generated_tokens": 8, "gradient_tokens": 8, "prompt_tokens": 6, "grad_norm": 1.0}
    _check_equal(ours, ours | {"grad_norm": 1.0005})
    for change in ({"gradient_tokens": 7}, {"grad_norm": 1.01}):
        with pytest.raises(SystemExit, match="unequal work"):
            _check_equal(ours, ours | change)
