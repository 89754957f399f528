"""Ranks of a trainer that share the tokens of sequences (axis cp), in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.recipes.conftest import Run, run_in
from tests.dist.recipes.mixtures import write_mixture

pytestmark = pytest.mark.dist

SHARED = ("--split.train.cp=2", "--run.verify_every=1", "--trainer.max_tokens=64")


def test_no_token_is_unequal_and_the_same_tokens_are_drawn(run: Run) -> None:
    alone = run("grpo", "--steps=2", "--run.verify_every=1")
    shared = run("grpo", "--steps=2", *SHARED, nproc=2, name="shared")
    assert shared.code == 0, shared.sentence
    for row, other in zip(shared.metrics, alone.metrics, strict=True):
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["onpolicy/compared_tokens"] == other["onpolicy/compared_tokens"] > 0
        assert row["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-3)
    drawn, others = (ended.samples(1) for ended in (shared, alone))
    assert [one["tokens"] for one in drawn] == [one["tokens"] for one in others]
    assert [one["logprobs"] for one in drawn] == [one["logprobs"] for one in others]


def test_recorded_routes_are_replayed(tmp_path: Path) -> None:
    model = write_mixture(tmp_path / "model", "qwen3_moe")
    words = (f"--model={model}", "--trainer.init=folder", "--steps=2", *SHARED)
    kept_sets = ("--sampling.top_p=0.9", "--sampling.top_k=20")
    ended = run_in(tmp_path, "grpo", *words, "--sampling.replay_routes=true", *kept_sets, nproc=2)
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        assert row["onpolicy/mismatched_tokens"] == row["onpolicy/router_flips"] == 0
        assert row["experts/rerouted_worst"] == 0
        assert row["onpolicy/compared_tokens"] > 0
