"""What the report says has changed in a run."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.errors import DataError
from spmd_rl.report.means import Mean, evaluation_mean, fifths, latest_mean, mean_of, num_latest
from spmd_rl.report.verdicts.changes import what_changed
from spmd_rl.report.verdicts.findings import NOT_MOVING, SOLVED, Setup
from spmd_rl.report.verdicts.signs import signs
from spmd_rl.report.verdicts.turned import turned_prompts

NOWHERE = Setup({}, Path("nowhere"))
SETTINGS = {
    "steps": 20,
    "trainer.lr": 0.01,
    "prompts_per_step": 16,
    "sampling.max_tokens": 3,
    "sampling.num_samples": 8,
    "kl.coef": 0.01,
    "eval.every": 5,
}
KNOWN = Setup(SETTINGS, Path("nowhere"))


def evaluation(step: int, reward: float, error: float | None = 0.02) -> dict[str, Any]:
    row = {"step": step, "eval/gsm/reward": reward, "eval/reward": reward}
    return row if error is None else row | {"eval/gsm/reward_error": error}


def steps(**columns: Any) -> list[dict[str, Any]]:
    """Twenty steps; a column is a function of the step from 0, and `__` stands for `/`."""
    return [
        {"step": i + 1} | {name.replace("__", "/"): value(i) for name, value in columns.items()}
        for i in range(20)
    ]


def findings(rows: list[dict[str, Any]], setup: Setup = NOWHERE) -> dict[str, str]:
    """The sentences with their moods."""
    return {one["text"]: one["mood"] for one in what_changed(rows, setup) if one["text"]}


def advice(rows: list[dict[str, Any]], setup: Setup = KNOWN) -> str:
    return "\n".join(said for one in what_changed(rows, setup) for said in one["advice"])


@pytest.mark.parametrize(
    ("rewards", "mood", "words"),
    [
        (
            [0.5, 0.0, 0.9],
            "good",
            "reward 0.500 ± 0.02 → 0.900 ± 0.02: it rose, and is at its best",
        ),
        ([0.5, 0.0, 0.1], "bad", "reward 0.500 ± 0.02 → 0.100 ± 0.02: it fell"),
        (
            [0.5, 0.0, 0.55],
            "flat",
            "reward 0.500 ± 0.02 → 0.550 ± 0.02: no change beyond 2 standard errors",
        ),
        (
            [0.5, 0.95, 0.7],
            "mixed",
            "reward 0.500 ± 0.02 → 0.700 ± 0.02: it rose; down from its best, 0.950 ± 0.02 "
            "at step 10 (no checkpoint of it is kept)",
        ),
        (
            [0.5, 0.92, 0.9],
            "good",
            "reward 0.500 ± 0.02 → 0.900 ± 0.02: it rose; down from its best, 0.920 ± 0.02 "
            "at step 10 (no checkpoint of it is kept), within the noise",
        ),
        (
            [0.5, 0.9, 0.5],
            "bad",
            "reward 0.500 ± 0.02 → 0.500 ± 0.02: no change; down from its best, 0.900 ± 0.02 "
            "at step 10 (no checkpoint of it is kept)",
        ),
    ],
)
def test_evaluations_are_compared_with_their_noise_and_their_best(
    rewards: list[float], mood: str, words: str
) -> None:
    rows = [evaluation(10 * i, reward) for i, reward in enumerate(rewards)]
    assert findings(rows) == {f"Evaluation gsm, from step 0 to 20: {words}": mood}


def test_much_of_a_gain_lost_is_told_though_the_noise_is_large() -> None:
    """A run that ended at 0.312 after 0.425 had not simply risen."""
    rewards = {0: 0.163, 15: 0.425, 25: 0.288, 30: 0.312}
    ((text, mood),) = findings([evaluation(*one, error=0.05) for one in rewards.items()]).items()
    assert mood == "mixed"
    assert "it rose; down from its best, 0.425 ± 0.05 at step 15" in text
    assert text.endswith("within the noise")


def test_the_checkpoint_of_the_best_is_named_if_it_is_kept(tmp_path: Path) -> None:
    rows = [evaluation(0, 0.2), evaluation(15, 0.8), evaluation(30, 0.4)]
    assert 'Set run.best = "eval/gsm/reward"' in advice(rows)
    (tmp_path / "checkpoints/step_000015").mkdir(parents=True)
    kept = Setup(SETTINGS, tmp_path)
    (text,) = findings([*rows], Setup({}, tmp_path))
    assert text.endswith("at step 15 (checkpoints/step_000015)")
    assert "Use checkpoints/step_000015" in advice(rows, kept)
    assert "Set run.best" not in advice(rows, kept)


@pytest.mark.parametrize(
    ("score", "last", "mood", "words"),
    [
        ("loss", 0.5, "good", "loss 1.000 ± 0.02 → 0.500 ± 0.02: it fell, and is at its best"),
        ("loss", 1.5, "bad", "loss 1.000 ± 0.02 → 1.500 ± 0.02: it rose"),
        ("token_accuracy", 0.5, "bad", "token accuracy 1.000 ± 0.02 → 0.500 ± 0.02: it fell"),
        ("margin", 2.0, "good", "margin 1.000 ± 0.02 → 2.000 ± 0.02: it rose, and is at its best"),
    ],
)
def test_held_out_scores_are_compared_by_what_is_better(
    score: str, last: float, mood: str, words: str
) -> None:
    name = f"eval/text/{score}"
    rows = [
        {"step": step, name: value, f"{name}_error": 0.02} for step, value in ((0, 1.0), (9, last))
    ]
    assert findings(rows) == {f"Evaluation text, from step 0 to 9: {words}": mood}


def test_a_loss_that_rises_again_is_up_from_its_best() -> None:
    name = "eval/text/loss"
    rows = [
        {"step": step, name: value, f"{name}_error": 0.02}
        for step, value in ((0, 2.0), (5, 1.0), (9, 1.5))
    ]
    ((text, mood),) = findings(rows).items()
    assert mood == "mixed"
    assert "it fell; up from its best, 1.000 ± 0.02 at step 5" in text


def test_no_change_is_told_without_two_evaluations_or_their_noise() -> None:
    assert findings([evaluation(0, 0.5)]) == {}
    ((text, mood),) = findings([evaluation(0, 0.5, None), evaluation(9, 0.9, None)]).items()
    assert mood == ""
    assert text.endswith("0.5 → 0.9; the noise is not known")


def test_rewards_and_their_parts_are_compared() -> None:
    rows = steps(
        reward__mean=lambda i: i / 20 + i % 2 / 100,
        reward__format=lambda i: 1 - i / 20,
        reward__std=lambda i: i,
    )
    found = findings(rows)
    total, part = found
    assert (found[total], found[part]) == ("good", "")
    assert total.startswith("Reward in training: 0.080 ± 0.034 → 0.880")
    assert part.startswith("Reward part format: 0.925")
    assert part.endswith("it fell")


def test_a_short_run_has_the_errors_of_its_steps() -> None:
    rows = [
        {"step": step, "reward/mean": reward, "reward/mean_error": 0.05}
        for step, reward in ((1, 0.2), (2, 0.3), (3, 0.8))
    ]
    assert findings(rows) == {
        "Reward in training: 0.200 ± 0.05 → 0.800 ± 0.05: it rose, and is at its best": "good"
    }
    without = [{"step": row["step"], "reward/mean": row["reward/mean"]} for row in rows]
    assert findings(without) == {"Reward in training: 0.2 → 0.8; the noise is not known": ""}


def test_a_reward_that_collapsed_is_told_from_its_best() -> None:
    rows = steps(reward__mean=lambda i: [0.1, 0.5, 0.9, 0.5, 0.3][i // 4] + i % 2 / 100)
    ((text, mood),) = findings(rows).items()
    assert mood == "mixed"
    assert "it rose; down from its best, 0.9050 ± 0.0029 in steps 9 to 12" in text
    assert "Divide trainer.lr (now 0.01) by three, or raise prompts_per_step (now 16)" in (
        advice(rows)
    )


@pytest.mark.parametrize(
    ("name", "says", "moves"),
    [
        ("dpo/accuracy", "Pairs ranked as labelled in training", lambda i: 0.5 + i / 50),
        ("distill/kl", "KL to the teacher in training", lambda i: 2 - i / 20),
        ("train/loss", "Loss in training", lambda i: 3 - i / 10),
    ],
)
def test_recipes_without_rewards_have_a_score_too(name: str, says: str, moves: Any) -> None:
    rows = [{"step": i + 1, name: moves(i), "train/loss": moves(i)} for i in range(20)]
    ((text, mood),) = findings(rows).items()
    assert text.startswith(says)
    assert mood == "good"


def test_lengths_and_what_was_left_out_are_warned_of() -> None:
    rows = steps(
        rollout__truncated=lambda i: i / 40,
        rollout__response_tokens_mean=lambda i: 10 + 2 * i,
        rollout__rejected_equal=lambda i: 2,
        rollout__rejected_long=lambda i: 0,
        reward__failed_samples=lambda i: i % 2,
    )
    assert findings(rows) == {
        "44% of the last responses were cut at sampling.max_tokens, 4% of the first": "bad",
        "Responses went from 13 to 45 tokens": "bad",
        "Rejected groups by reason: 40 equal": "",
        "10 samples failed, and nothing was learned from them": "bad",
    }
    assert "Raise sampling.max_tokens (now 3)" in advice(rows)
    assert "docs/failures.md" in advice(rows)


def test_causes_of_failures_are_counted(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    agent = "generate AgentProgram on prompt {} sample 0 (prompt 'a (b): c', answer '3'): agent: it"
    errors = [f"{agent.format(number)} fell" for number in range(4)]
    errors += [f"{agent.format(9)} took longer than 8.5 s", "reward math: odd"]
    lines = [{"status": "failed", "metadata": {"error": error}} for error in errors]
    lines += [{"status": "completed", "text": "failed"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "samples/step_00002.jsonl").write_text(text)
    rows = [{"step": 1}, {"step": 2, "reward/failed_samples": 6.0}]
    (finding,) = signs(rows, Setup({}, tmp_path))
    assert [line.partition("failures: ")[2] for line in finding.advice[:-1]] == [
        "4 samples: generate AgentProgram: agent: it fell",
        f"a sample: {errors[4]}",
        "a sample: reward math: odd",
    ]
    assert finding.advice[-1] == f"Read more in {tmp_path}/samples: docs/failures.md"


def test_prompts_that_teach_nothing_are_told_with_what_to_do() -> None:
    solved = steps(reward__mean=lambda i: 0.95, reward__solve_all=lambda i: 0.73)
    said = findings(solved)
    assert said["73% of the last prompts had rewards of 1 only, and taught nothing"] == "flat"
    assert "Take harder prompts" in advice(solved)
    assert "Multiply trainer.lr" not in advice(solved)
    assert "does-not-move" not in advice(solved)
    hard = steps(reward__mean=lambda i: 0.05, reward__solve_none=lambda i: 0.75)
    said = findings(hard)
    assert said["75% of the last prompts had no reward above 0, and taught nothing"] == "bad"
    assert "sampling.num_samples (now 8)" in advice(hard)
    beyond = steps(reward__mean=lambda i: 7.0, reward__solve_all=lambda i: 1.0)
    assert len(findings(beyond)) == 1, "of rewards beyond 0 to 1 the shares say nothing"


def test_steps_without_a_gradient_are_counted_and_explained() -> None:
    masked = steps(train__grad_norm=lambda i: i % 2, version__masked_share=lambda i: 1 - i % 2)
    said = "10 of 20 steps learned nothing: their gradient norm is 0"
    assert findings(masked)[f"{said}, and in 10 of them mask_lag left out all tokens"] == "bad"
    assert "Raise mask_lag (now 0)" in advice(masked, Setup({"mask_lag": 0}, Path("nowhere")))
    assert findings(steps(train__grad_norm=lambda i: i % 2)) == {said: "flat"}
    assert findings(steps(train__grad_norm=lambda i: 1)) == {}


def test_a_reward_that_stands_still_is_advised_by_the_page_on_it() -> None:
    flat = steps(reward__mean=lambda i: 0.5 + i % 2 / 100)
    assert "Multiply trainer.lr (now 0.01) by three" in advice(flat)
    assert "docs/hyperparameters.md#the-reward-does-not-move" in advice(flat)


def test_a_policy_far_from_its_reference_is_told() -> None:
    rows = steps(train__kl=lambda i: i / 8)
    (text,) = findings(rows)
    assert text == "The policy is 2.19 nats per token away from its reference"
    assert "Raise kl.coef (now 0.01)" in advice(rows)


def test_mismatched_tokens_lead_to_the_microscope() -> None:
    rows = steps(onpolicy__mismatched_tokens=lambda i: 1, onpolicy__compared_tokens=lambda i: 10)
    (text,) = findings(rows)
    assert text == "20 of 200 tokens differ between trainer and engine"
    assert "spmd-rl mismatch nowhere" in advice(rows)


def test_every_run_is_told_what_to_do_next() -> None:
    risen = steps(reward__mean=lambda i: i / 20 + i % 2 / 100)
    assert "It still improves at the end: raise steps (now 20)" in advice(risen)
    flat_at_its_top = steps(reward__mean=lambda i: min(0.2 + i / 10, 0.99) + i % 2 / 100)
    assert "raise steps" not in advice(flat_at_its_top)
    assert "Name held-out data in eval.data" in advice(risen)
    assert "Name held-out data" not in advice([evaluation(0, 0.5), *risen])
    assert "10 of 20 steps are done" in findings(risen[:10], KNOWN)


def test_no_setting_is_named_that_the_recipe_does_not_have() -> None:
    rows = steps(reward__mean=lambda i: 1 - i / 20 + i % 2 / 100, rollout__truncated=lambda i: 1)
    assert "trainer.lr" not in advice(rows, NOWHERE)
    assert "None" not in advice(rows, NOWHERE)


def test_settings_in_advice_have_a_row_in_the_docs_that_it_names() -> None:
    page = (Path(__file__).parents[3] / "docs/hyperparameters.md").read_text(encoding="utf-8")
    for link in (NOT_MOVING, SOLVED):
        heading = link.partition("#")[2].replace("-", " ")
        assert f"## {heading.capitalize()}\n" in page
    for key in ("trainer.lr", "prompts_per_step", "sampling.num_samples", "sampling.max_tokens"):
        assert f"`{key}`" in page


def test_means_of_steps_have_the_error_that_is_known() -> None:
    rows = [{"step": i, "reward/mean": float(i % 2)} for i in range(1, 13)]
    assert mean_of(rows, "reward/mean") == Mean(0.5, pytest.approx((3 / 11 / 12) ** 0.5))
    within = [row | {"reward/mean_error": 0.3} for row in rows[:9]]
    assert mean_of(within, "reward/mean").error == pytest.approx(0.1)
    assert [num_latest(count) for count in (1, 9, 10, 24, 120)] == [1, 1, 2, 4, 24]
    parts = fifths(rows, "reward/mean")
    assert [len(part) for part in parts] == [2] * 6
    assert [*chain(*fifths(rows[:11], "reward/mean"))] == rows[:11]
    assert latest_mean(rows, "missing") is None


def test_the_error_of_several_sets_comes_from_all() -> None:
    row = {
        "eval/reward": 0.5,
        "eval/a/reward": 0.4,
        "eval/a/reward_error": 0.03,
        "eval/b/reward": 0.6,
        "eval/b/reward_error": 0.04,
    }
    assert evaluation_mean(row, "eval/reward") == Mean(0.5, pytest.approx(0.025))
    assert evaluation_mean(row, "eval/b/reward") == Mean(0.6, 0.04)


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
    with pytest.raises(DataError, match=r"00001\.jsonl:1: not a line of samples"):
        turned_prompts(tmp_path)
