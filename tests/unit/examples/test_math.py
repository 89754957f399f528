"""The math example: its data is what its generator makes, its answers are right, and templates of
the evaluation are new.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from pathlib import Path

import pytest

from examples.math.problems import (
    DISTRACTORS,
    HELD_OUT,
    OPERATORS,
    TRAINING,
    careless,
    problem,
    solution,
)
from spmd_rl.hooks.signatures import load_reward
from spmd_rl.model.tokenizer import load_tokenizer
from tests.unit.rewards.cases import ask, say

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "math"
STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (-?\d+)")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def test_no_question_is_in_two_files() -> None:
    names = ("train", "warmup", "eval_seen", "eval_new")
    questions = [row["prompt"] for name in names for row in rows(name)]
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("template", [*TRAINING, *HELD_OUT])
def test_solutions_are_right_and_mistakes_are_wrong(template) -> None:
    rng = random.Random(3)
    for _ in range(50):
        one = problem(template, rng)
        result = None
        for number, step in enumerate(one.steps):
            found = STEP.fullmatch(step)
            assert found is not None
            left, sign, right, result = found.groups()
            assert str(OPERATORS[sign](int(left), int(right))) == result
            assert left in (one.question if number == 0 else one.steps[number - 1])
            assert re.search(rf"\b{right}\b", one.question)
        assert result == str(one.answer) and one.answer >= 0
        assert solution(one).endswith(f"\\boxed{{{one.answer}}}")
        assert f"\\boxed{{{one.answer}}}" not in careless(one, rng) or len(one.steps) > 1


@pytest.mark.parametrize("config", ["grpo.toml", "gpu/grpo.toml"])
def test_a_sum_that_is_not_computed_earns_nothing(config: str) -> None:
    """With reward = "math" a model learned to write `3 + 8 =}`, which is graded as 11."""
    cfg = tomllib.loads((EXAMPLE / config).read_text())
    exploit, honest = say("3 + 8 =}"), say(r"3 + 8 = 11. \boxed{11}")
    assert load_reward("math").function(ask("11"), exploit) == 1
    for name in (cfg["reward"], cfg["eval"]["reward"]):
        grade = load_reward(name).function
        assert (grade(ask("11"), exploit), grade(ask("11"), honest)) == (0, 1)
    stricter = load_reward(cfg["eval"]["reward"]).function
    assert stricter(ask("11"), say(r"\boxed{3 + 8}")) == 0


def test_held_out_templates_are_new() -> None:
    training = {template.text for template in TRAINING}
    assert not training & {template.text for template in HELD_OUT}
    assert {step for one in HELD_OUT for step in one.steps} <= {
        step for one in TRAINING for step in one.steps
    }


def test_some_problems_have_a_distractor() -> None:
    ends = [text.split("{d}")[1] for text in DISTRACTORS]
    asked = [row["prompt"] for row in rows("train")]
    share = sum(any(end in text for end in ends) for text in asked) / len(asked)
    assert 0.2 < share < 0.4


def test_the_tokenizer_has_a_token_a_digit_and_a_chat_template() -> None:
    tokenizer = load_tokenizer(str(EXAMPLE / "model"))
    question = rows("eval_new")[0]["prompt"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_start|>assistant\n")
    (tokens,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text
    (number,) = tokenizer(["1234"], add_special_tokens=False)["input_ids"]
    assert len(number) == 4
