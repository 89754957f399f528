"""What the report says has changed in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.errors import DataError
from spmd_rl.report.changes import what_changed
from spmd_rl.report.turned import turned_prompts


def evaluation(step: int, reward: float, error: float | None = 0.02) -> dict[str, Any]:
    row = {"step": step, "eval/gsm/reward": reward, "eval/reward": reward}
    return row if error is None else row | {"eval/gsm/reward_error": error}


def steps(**columns: Any) -> list[dict[str, Any]]:
    """Twenty steps; a column is a function of the step from 0, and `__` stands for `/`."""
    return [
        {"step": i + 1} | {name.replace("__", "/"): value(i) for name, value in columns.items()}
        for i in range(20)
    ]


@pytest.mark.parametrize(
    ("last", "mood", "words"),
    [
        (0.9, "good", "reward 0.5 ± 0.02 → 0.9 ± 0.02: it rose"),
        (0.1, "bad", "reward 0.5 ± 0.02 → 0.1 ± 0.02: it fell"),
        (0.55, "", "reward 0.5 ± 0.02 → 0.55 ± 0.02: no change beyond 2 standard errors"),
    ],
)
def test_evaluations_are_compared_with_their_noise(last: float, mood: str, words: str) -> None:
    (found,) = what_changed([evaluation(0, 0.5), evaluation(10, 0.0), evaluation(20, last)])
    assert found == {"mood": mood, "text": f"Evaluation gsm, from step 0 to 20: {words}"}


@pytest.mark.parametrize(
    ("score", "last", "mood", "words"),
    [
        ("loss", 0.5, "good", "loss 1 ± 0.02 → 0.5 ± 0.02: it fell"),
        ("loss", 1.5, "bad", "loss 1 ± 0.02 → 1.5 ± 0.02: it rose"),
        ("token_accuracy", 0.5, "bad", "token accuracy 1 ± 0.02 → 0.5 ± 0.02: it fell"),
        ("accuracy", 2.0, "good", "accuracy 1 ± 0.02 → 2 ± 0.02: it rose"),
        ("margin", 2.0, "good", "margin 1 ± 0.02 → 2 ± 0.02: it rose"),
    ],
)
def test_held_out_scores_are_compared_by_what_is_better(
    score: str, last: float, mood: str, words: str
) -> None:
    name = f"eval/text/{score}"
    rows = [
        {"step": step, name: value, f"{name}_error": 0.02} for step, value in ((0, 1.0), (9, last))
    ]
    (found,) = what_changed(rows)
    assert found == {"mood": mood, "text": f"Evaluation text, from step 0 to 9: {words}"}


def test_no_change_is_told_without_two_evaluations_or_their_noise() -> None:
    assert what_changed([evaluation(0, 0.5)]) == []
    (found,) = what_changed([evaluation(0, 0.5, None), evaluation(9, 0.9, None)])
    assert found["mood"] == ""
    assert found["text"].endswith("0.5 → 0.9; the noise is not known")


def test_rewards_and_their_parts_are_compared() -> None:
    rows = steps(
        reward__mean=lambda i: i / 20 + i % 2 / 100,
        reward__format=lambda i: 1 - i / 20,
        reward__std=lambda i: i,
    )
    total, part = what_changed(rows)
    assert (total["mood"], part["mood"]) == ("good", "")
    assert total["text"].startswith("Reward in training: 0.08")
    assert part["text"].startswith("Reward part format: 0.925")
    assert part["text"].endswith("it fell")
    assert what_changed(rows[:9]) == [], "too few steps"


def test_lengths_and_what_was_left_out_are_warned_of() -> None:
    rows = steps(
        rollout__truncated=lambda i: i / 40,
        rollout__response_tokens_mean=lambda i: 10 + 2 * i,
        rollout__rejected_equal=lambda i: 2,
        rollout__rejected_long=lambda i: 0,
        reward__failed_samples=lambda i: i % 2,
    )
    found = {one["text"]: one["mood"] for one in what_changed(rows)}
    assert found == {
        "44% of the last responses were cut at sampling.max_tokens, 4% of the first": "bad",
        "Responses went from 13 to 45 tokens": "bad",
        "Rejected groups by reason: 40 equal": "",
        "10 samples failed, and nothing was learned from them": "bad",
    }


def samples(run: Path, step: int, rewards: dict[int, list[float | None]]) -> Path:
    path = run / f"samples/eval_my_step_set_step_{step:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = [
        {"prompt_uid": uid, "prompt": f"p{uid}", "answer": "a", "text": f"t{step}", "reward": one}
        for uid, own in rewards.items()
        for one in own
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_that_turned(tmp_path: Path) -> None:
    samples(tmp_path, 0, {1: [0, 0], 2: [1, 1], 3: [0, 1], 4: [0, 0], 5: [None, None]})
    samples(tmp_path, 5, {1: [0, 0], 2: [1, 1], 3: [1, 1], 4: [1, 1], 5: [1, 1]})
    samples(tmp_path, 9, {1: [1, None], 2: [0, 0], 3: [0, 1], 4: [0, 0], 5: [1, 1]})
    (found,) = turned_prompts(tmp_path)
    examples = found.pop("examples")
    assert found == {
        "set": "my_step_set",
        "first": 0,
        "last": 9,
        "num_prompts": 4,
        "num_right": 1,
        "num_wrong": 1,
    }
    assert [(one["prompt"], one["before"], one["after"]) for one in examples] == [
        ("p1", "t0", "t9"),
        ("p2", "t0", "t9"),
    ]
    assert turned_prompts(tmp_path, small=True)[0]["examples"] == []


def test_one_evaluation_turns_nothing(tmp_path: Path) -> None:
    samples(tmp_path, 0, {1: [0.0]})
    assert turned_prompts(tmp_path) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    samples(tmp_path, 0, {1: [0.0]})
    path = samples(tmp_path, 1, {1: [0.0]})
    path.write_text('{"prompt": "no uid"}\n')
    with pytest.raises(DataError, match=r"00001\.jsonl:1: not a sample"):
        turned_prompts(tmp_path)
