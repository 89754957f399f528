"""Charts of the report page: their lines, colours and units, and what needs no chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.build import gather
from spmd_rl.report.panels import PANELS
from spmd_rl.report.pictures.charts import charts
from spmd_rl.report.series import curves
from spmd_rl.report.verdicts.run_differences import run_differences
from tests.unit.report.synthetic import make_run

STYLE = Path(__file__).parents[3] / "spmd_rl/report/page/style.css"


def run_of(columns: dict[str, list[float]], name: str = "run") -> dict[str, Any]:
    """A run as `gather` has it, with these values from step 1 on."""
    count = len(next(iter(columns.values())))
    rows = [{"step": i + 1} | {key: own[i] for key, own in columns.items()} for i in range(count)]
    return {"name": name, "curves": curves(rows)}


def drawn(*runs: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The charts by title, each with the labels of its lines and their metrics."""
    return {
        chart["title"]: {line["label"]: line["metric"] for line in chart["lines"]}
        for chart in charts(runs)["charts"]
    }


DPO = {
    "dpo/margin": [0.0, 0.5],
    "dpo/chosen_reward": [0.0, 0.25],
    "dpo/rejected_reward": [0.0, -0.25],
    "dpo/chosen_logprob": [-9.0, -8.0],
    "dpo/rejected_logprob": [-9.0, -10.0],
    "train/kl": [0.0, 0.5],
    "train/ppo_kl": [0.0, 0.25],
    "eval/pairs/accuracy": [0.5, 0.75],
    "eval/pairs/margin": [0.0, 1.5],
    "eval/accuracy": [0.5, 0.75],
    "eval/margin": [0.0, 1.5],
}


def test_no_two_lines_of_a_chart_have_one_colour() -> None:
    for chart in charts([run_of(DPO)])["charts"]:
        colours = [line["colour"] for line in chart["lines"]]
        assert len(set(colours)) == len(colours), chart["title"]
    for panel in PANELS:
        places = [panel.colour(place) for place in range(len(panel.lines))]
        assert len(set(places)) == len(places), panel.title


def test_the_lines_of_a_chart_have_one_unit() -> None:
    for panel in PANELS:
        metrics = [line.metric for line in panel.lines if line.metric in METRIC_OF_NAME]
        assert {METRIC_OF_NAME[metric].unit for metric in metrics} == {panel.unit}, panel.title
    shown = drawn(run_of(DPO))
    assert shown["Evaluation: share of pairs ranked as labelled"] == {
        "pairs": "eval/pairs/accuracy"
    }
    margin = shown["Evaluation: reward of chosen minus rejected answers"]
    assert margin == {"pairs": "eval/pairs/margin"}


def test_one_set_has_one_curve_for_each_thing() -> None:
    once = {
        "eval/reward": [0.25, 0.5],
        "eval/pass@1": [0.25, 0.5],
        "eval/gsm/reward": [0.25, 0.5],
        "eval/gsm/avg@1": [0.25, 0.5],
        "eval/gsm/pass@1": [0.25, 0.5],
    }
    assert drawn(run_of(once)) == {"Evaluation: mean reward": {"gsm": "eval/gsm/reward"}}
    assert drawn(run_of(once), run_of(once, "b")) == {
        "Evaluation: mean reward, gsm": {"run": "eval/gsm/reward", "b": "eval/gsm/reward"}
    }
    graded = once | {"eval/gsm/avg@1": [0.125, 0.25]}
    assert set(drawn(run_of(graded))) == {"Evaluation: mean reward", "Evaluation: avg@1"}


def test_several_sets_share_a_chart_with_their_mean() -> None:
    sets = {f"eval/{name}/reward": [0.1 * i, 0.5] for i, name in enumerate("abc")}
    shown = drawn(run_of({"eval/reward": [0.1, 0.5], **sets}))
    assert list(shown["Evaluation: mean reward"]) == ["a", "b", "c", "all sets"]
    many = {f"eval/{i:02d}/reward": [0.01 * i, 0.5] for i in range(20)}
    charts_of_many = charts([run_of(many)])["charts"]
    assert [len(chart["lines"]) for chart in charts_of_many] == [8, 8, 4]


def test_what_never_changes_is_one_line_of_text() -> None:
    found = charts(
        [
            run_of(
                {
                    "train/lr": [1e-3, 1e-3],
                    "onpolicy/mismatched_tokens": [0, 0],
                    "sync/tensors": [70, 70],
                    "sync/verified_tensors": [70, 70],
                    "sync/shared_tensors": [0, 0],
                    "rollout/response_tokens_mean": [3.0, 3.004],
                    "onpolicy/ess": [1.0, 1.0],
                    "train/entropy": [1.0, 0.5],
                }
            )
        ]
    )
    assert [chart["title"] for chart in found["charts"]] == ["Entropy"]
    assert found["constant"] == [
        "response length 3 to 3.004",
        "mismatched tokens 0",
        "effective sample size, trainer / engine 1",
        "learning rate 0.001",
        "weights of the engine 70 (pushed), 70 (equal to the trainer's), 0 (the trainer's memory)",
    ]


def test_a_value_known_once_is_drawn_and_a_spike_too() -> None:
    assert drawn(run_of({"train/lr": [1e-3]})) == {"Learning rate": {"rate": "train/lr"}}
    spike = [0.0] * 5000
    spike[77] = 1.0
    assert drawn(run_of({"onpolicy/mismatched_tokens": spike}))


def test_differences_between_trainer_and_engine_keep_their_chart() -> None:
    assert "Mismatched tokens" in drawn(run_of({"onpolicy/mismatched_tokens": [3, 3]}))


def test_rounding_around_zero_is_no_signal() -> None:
    noise = {"train/loss": [-1e-8, 5e-9, 0.0], "train/ppo_kl": [0.0, -2e-9, 1e-9]}
    found = charts([run_of(noise)])
    assert found["charts"] == []
    assert found["constant"] == [
        "KL divergences of the policy 0 within rounding, at most 2e-09",
        "loss 0 within rounding, at most 1e-08",
    ]
    assert "Learning rate" in drawn(run_of({"train/lr": [1e-8, 2e-8]})), "a small rate is a rate"
    assert "Loss" in drawn(run_of({"train/loss": [-1e-8, 1e-3]}))


def test_numbers_of_the_first_screen_are_those_of_the_legends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=120, num_ranks=1, sample_steps=[])
    (found,) = gather([run])["runs"]
    latest = found["curves"]["latest"]["reward/mean"]
    assert found["figures"][0]["value"] == latest
    (said,) = [one["text"] for one in found["changes"] if one["text"].startswith("Reward in")]
    assert f"→ {latest:.4f} ±" in said
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert latest == pytest.approx(np.mean([row["reward/mean"] for row in rows[-24:]]), rel=1e-6)
    assert found["num_latest"] == 24


def test_a_time_that_some_steps_lack_counts_as_none_there() -> None:
    rows = [{"step": i + 1, "time/step": 1.0} for i in range(10)]
    rows[9]["time/eval"] = 3.0
    assert curves(rows)["latest"] == {"time/step": 1, "time/eval": 1.5}


def test_runs_are_compared_with_their_noise(tmp_path: Path) -> None:
    for name, last in (("a", 0.5), ("b", 0.8)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [
            {"step": 0, "eval/gsm/reward": 0.4, "eval/gsm/reward_error": 0.05},
            {"step": 9, "eval/gsm/reward": last, "eval/gsm/reward_error": 0.05},
            {"step": 10, "reward/mean": 0.5 if name == "a" else 0.52, "reward/mean_error": 0.05},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = gather([tmp_path / "a", tmp_path / "b"])
    assert [(one["mood"], one["text"]) for one in found["comparisons"]] == [
        (
            "good",
            "Evaluation gsm at step 9: reward b 0.800 ± 0.05, a 0.500 ± 0.05: b is ahead of a "
            "beyond the noise",
        ),
        (
            "flat",
            "Reward in training, last fifth of the steps: b 0.520 ± 0.05, a 0.500 ± 0.05: "
            "no difference beyond 2 standard errors between b and a",
        ),
    ]
    assert found["runs"][1]["changes"][0]["mood"] == "good"
    assert gather([tmp_path / "a"])["comparisons"] == []


def test_runs_of_different_lengths_are_compared_at_their_last_common_step(tmp_path: Path) -> None:
    for name, num_steps, every in (("long", 200, 40), ("short", 100, 50)):
        rewards = {step: min(0.5 + step / 200, 0.99) for step in range(1, num_steps + 1)}
        rows = [
            {"step": step, "reward/mean": reward, "reward/mean_error": 0.01}
            | ({"eval/gsm/reward": reward} if step % every == 0 or step == 20 else {})
            for step, reward in rewards.items()
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = gather([tmp_path / "long", tmp_path / "short"])
    assert [one["text"] for one in found["comparisons"]] == [
        "The runs are compared at step 100, the last of all: long has 200, short has 100",
        "Evaluation gsm at step 20: reward long 0.6, short 0.6: no difference",
        "Reward in training, last fifth of the steps: long 0.9517 ± 0.0022, short 0.9517 ± 0.0022: "
        "no difference",
    ]
    long, short = (run["figures"][0]["value"] for run in found["runs"])
    assert long == short < found["runs"][0]["curves"]["latest"]["reward/mean"]


def test_runs_without_a_common_step_are_said_to_be_so() -> None:
    early, late = ([{"step": s, "reward/mean": 0.1} for s in of] for of in ([1, 2], [3, 4, 5]))
    first, *_ = run_differences({"a": early, "b": late})
    assert first["text"] == (
        "The runs have no step in common, and each is taken whole: a has 2, b has 5"
    )
