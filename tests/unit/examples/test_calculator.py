"""The calculator example: its data is what its generator makes, its hooks do what its page says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.calculator.hooks import MAX_TURNS, calculate, right
from spmd_rl.algo.packing import pack
from spmd_rl.hooks.signatures import load_reward
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from tests.unit.examples.played import played

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "calculator"
HOOKS = EXAMPLE / "hooks.py"
TEXT = "37*48+12="


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def term(prompt: str) -> str:
    return prompt.partition("=")[0]


def asked() -> Prompt:
    return Prompt(3, np.array([*map(ord, TEXT)], np.int32), text=TEXT, answer="1788")


def test_answers_are_right_and_the_teacher_is_careless() -> None:
    train, taught = rows("train"), rows("warmup")
    for row in train:
        product, sign, addend = term(row["prompt"]).partition("+" if "+" in row["prompt"] else "-")
        assert row["answer"] == calculate(f"{calculate(product)}{sign}{addend}")
    answers = {row["prompt"]: row["answer"] for row in train}
    assert answers.keys().isdisjoint(f"{term(row['prompt'])}=" for row in taught)
    firsts = [row for row in taught if row["prompt"].endswith("=")]
    calls = [row["answer"].strip("[]") for row in firsts if "[" in row["answer"]]
    assert 0.7 < len(calls) / len(firsts) < 0.9
    is_right = [row["prompt"].startswith(row["answer"].strip("[]")) for row in firsts]
    assert 0.55 < np.mean(is_right) < 0.75


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*48", "1776"),
        ("12-40", "-28"),
        ("007+1", "8"),
        ("9" * 9 + "*" + "9" * 9, "999999998000000001"),
        ("9" * 10 + "*1", "?"),
        ("1+2+3", "?"),
        ("-1+2", "?"),
        ("2**9", "?"),
        ("1/0", "?"),
        ("x+1", "?"),
        ("１+1", "?"),
        ("", "?"),
    ],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculate(expression) == result


def test_an_episode_of_three_turns() -> None:
    """What the model wrote is learned, what the calculator said is not."""
    said = "[37*48]", "[1776+12]", "1788"
    sample, calls = played(HOOKS, asked(), *said)
    assert sample.text == "[37*48]=1776;[1776+12]=1788;1788"
    assert [call.limits.stop for call in calls] == [("]",)] * 3
    drawn = "".join(chr(token) for token in sample.tokens[sample.mask])
    assert drawn == "".join(said)
    observed = ~sample.mask
    assert set(sample.versions[observed]) == {-1}
    assert not sample.logprobs[observed].any()
    rewarded = [sample.replace(reward=1.0), sample.replace(reward=0.0, index=1)]
    batch = pack([Group(asked(), rewarded)], [np.array([1.0, -1.0])])
    no_prompt = np.zeros(len(TEXT), np.bool_)
    assert batch.mask.tolist() == [*no_prompt, *sample.mask] * 2
    assert right(asked(), sample) == {"reward": 1.0, "calls": 2.0}


def test_an_answer_at_once() -> None:
    sample, _ = played(HOOKS, asked(), "1788")
    assert sample.mask.all()
    assert right(asked(), sample) == {"reward": 1.0, "calls": 0.0}


def test_calls_without_end() -> None:
    sample, calls = played(HOOKS, asked(), *["[1+]"] * MAX_TURNS)
    assert sample.text == "[1+]=?;" * MAX_TURNS
    assert len(calls) == MAX_TURNS
    assert right(asked(), sample) == {"reward": 0.0, "calls": float(MAX_TURNS)}


def test_the_reward() -> None:
    (sample, _), reward = played(HOOKS, asked(), "1788"), load_reward(f"{HOOKS}:right").function
    for text, status, expected in (
        ("[37*48]=1776;1788", "completed", 1.0),
        ("[37*48]=1776;1788", "truncated", 0.0),
        ("[37*48]=1776;1776", "completed", 0.0),
        ("[1788", "completed", 0.0),
    ):
        said = sample.replace(text=text, status=status)
        assert reward(asked(), said)["reward"] == expected
