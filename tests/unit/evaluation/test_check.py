"""Evaluation sets that are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd_rl.check.inputs import check_evaluation
from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.recipes import evaluate, grpo, rlhf

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic"
NEEDED = [f"model={EXAMPLE / 'model'}", f"data={EXAMPLE / 'train.jsonl'}"]


def checked(*words: str) -> None:
    check_evaluation(load(grpo.Config, overrides=[*NEEDED, *words]))


def test_sets_that_can_work() -> None:
    data = EXAMPLE / "eval.jsonl"
    checked()
    checked(f"eval.data={data}", f"eval.reward={EXAMPLE / 'reward.py'}:correct")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval.data=missing.jsonl"], "missing.jsonl: no such file"),
        (["eval.data=DATA", "eval.reward=no_module:f"], "no_module"),
        (["eval.data=DATA", "eval.reward=other.module:exact"], "two reward functions are called"),
        (["eval.data=DATA", "eval.prompts.answer_key=gold"], "eval.jsonl:1"),
        (["eval.data=DATA", "eval.sampling.stop_ids=[999999]"], "sampling.stop_ids holds 999999"),
    ],
)
def test_sets_that_cannot(words: list[str], sentence: str) -> None:
    data = str(EXAMPLE / "eval.jsonl")
    with pytest.raises(SpmdError) as told:
        checked(*(word.replace("DATA", data) for word in words))
    assert sentence in str(told.value)


def test_a_broken_line_of_a_set_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n{\n")
    with pytest.raises(SpmdError, match=r"sums\.jsonl:2"):
        checked(f"eval.data={path}")


def test_where_a_reward_model_grades_no_set_has_a_reward() -> None:
    with pytest.raises(ConfigError, match="eval.reward must be empty: rewards come from reward_m"):
        load(rlhf.Config, overrides=[*NEEDED, "eval.data=x", "eval.reward=a:f"])


def test_an_evaluation_needs_a_set_and_a_checkpoint_that_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no set: say --data FILE"):
        load(evaluate.Config, overrides=["model=m"])
    words = [NEEDED[0], f"data={EXAMPLE / 'eval.jsonl'}", f"checkpoint={tmp_path}"]
    with pytest.raises(ConfigError, match="is no checkpoint: name a folder such as"):
        evaluate.check(load(evaluate.Config, overrides=words))
