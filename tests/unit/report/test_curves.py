"""`curves.png`: its charts, their scales and legends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from spmd_rl.report.pictures import curves
from spmd_rl.report.pictures.colours import NAMED
from tests.unit.report.synthetic import metrics

Row = dict[str, Any]


def rows_of(num_steps: int = 40, **changed: float) -> list[Row]:
    rng = random.Random(0)
    changes = {name.replace("__", "/"): value for name, value in changed.items()}
    return [
        {"step": step} | metrics(step, num_steps, rng) | changes for step in range(1, num_steps + 1)
    ]


def supervised() -> list[Row]:
    kept = ("step", "train/", "perf/", "onpolicy/", "time/train", "time/step")
    rows = rows_of(onpolicy__compared_tokens=0)
    return [{name: value for name, value in row.items() if name.startswith(kept)} for row in rows]


def charts(rows: list[Row], *, laid_out: bool = False) -> dict[str, Any]:
    """The axes by the title. Only those that are laid out, which takes a while, have extents."""
    figure = curves.picture(rows, "runs/demo")
    if laid_out:
        figure.draw_without_rendering()
    return {axes.get_title("left"): axes for axes in figure.axes}


def named_in(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_run_has_a_chart_for_all_that_moves_and_no_texts_overlap() -> None:
    drawn = charts(rows_of(onpolicy__mismatched_tokens=3), laid_out=True)
    assert list(drawn) == [
        "Reward",
        "Response length",
        "Truncated responses",
        "Entropy",
        "Mismatched tokens",
        "Loss",
        "Time per step",
        "Speed",
    ]
    boxes = [axes.get_tightbbox() for axes in drawn.values()]
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)
    assert [len(axes.lines) for axes in drawn.values()] == [1, 1, 1, 1, 1, 1, 0, 2]
    assert drawn["Mismatched tokens"].lines[0].get_color() == NAMED["red"].code
    assert named_in(drawn["Speed"]) == ["rollout", "train"]


def test_the_title_is_the_name_with_the_count_of_mismatched_tokens() -> None:
    def title_of(rows: list[Row]) -> str:
        return str(curves.picture(rows, "demo").get_suptitle())

    many = rows_of(onpolicy__compared_tokens=123_456_789)
    assert title_of(many) == "demo · 0 of 4,938,271,560 tokens mismatched"
    assert title_of(rows_of(onpolicy__mismatched_tokens=3)) == (
        "demo · 120 of 204,800 tokens mismatched"
    )
    assert title_of(supervised()) == "demo · no tokens compared"
    assert title_of([{"step": 1, "train/loss": 1.0}]) == "demo"
    some = rows_of(2, onpolicy__mismatched_tokens=3)
    some[0]["onpolicy/compared_tokens"] = 0
    assert title_of(some) == "demo · 3 of 5,120 tokens mismatched", "of the step that compared any"
    old = [{"step": 1, "train/loss": 1.0, "onpolicy/mismatched_tokens": 3}]
    assert title_of(old) == "demo · 3 tokens mismatched", "of a run that did not count the others"


def test_charts_without_data_are_left_out() -> None:
    assert list(charts(supervised())) == ["Entropy", "Loss", "Time per step", "Speed"]
    assert curves.picture([{"step": 1, "reward/mean": None}], "") is None


def test_flat_lines_have_no_chart() -> None:
    flat = {"rollout__response_tokens_mean": 3.0, "train__loss": 3e-9}
    assert not {"Response length", "Loss"} & charts(rows_of(**flat)).keys()
    assert "Reward" in charts(rows_of(reward__mean=0.5)), "that a reward stands still is news"


def test_preferences_have_their_accuracy_and_the_rewards_of_both_answers() -> None:
    rows = [
        {
            "step": step,
            "dpo/accuracy": 0.5 + step / 100,
            "dpo/margin": step / 10,
            "dpo/chosen_reward": step / 20,
            "dpo/rejected_reward": -step / 20,
            "train/loss": 1 / step,
        }
        for step in range(1, 11)
    ]
    drawn = charts(rows)
    assert list(drawn) == ["Pairs ranked as labelled", "Rewards of pairs", "Loss"]
    assert named_in(drawn["Rewards of pairs"]) == ["margin", "chosen", "rejected"]
    lines = drawn["Rewards of pairs"].lines
    assert len({line.get_color() for line in lines}) == 3
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(set(widths), reverse=True), "an equal line is seen behind a later one"


def test_what_a_reward_returns_beside_it_has_a_chart_and_a_picture_an_end() -> None:
    rows = rows_of()
    for row in rows:
        row["reward/form"] = row["step"] / 40
    assert list(charts(rows))[-1] == "Reward part: form"
    for row in rows:
        row |= {f"reward/{number}": row["step"] / 40 for number in range(40)}
    assert len(charts(rows)) == curves.MAX_CHARTS


@pytest.mark.parametrize("length", [3, 30, 90])
def test_legends_are_whole_whatever_the_names(length: int) -> None:
    names = [f"{i}{'x' * (length - 1)}" for i in range(4)]
    rows = rows_of()
    for row in rows:
        row["eval/reward"] = 0.0
        row |= {f"eval/{name}/reward": row["step"] / (40 + i) for i, name in enumerate(names)}
    axes = charts(rows, laid_out=True)["Evaluation: mean reward"]
    assert ["".join(label.split()) for label in named_in(axes)] == [*names, "allsets"]
    box = axes.get_legend().get_window_extent()
    assert axes.figure.bbox.x0 <= box.x0 < box.x1 <= axes.figure.bbox.x1
    assert box.y1 <= axes.bbox.y0, "it hides no data"


@pytest.mark.parametrize(("slowest_s", "said"), [(1.234, "1.23"), (30.0, "30"), (1234.4, "1,234")])
def test_a_few_slow_steps_do_not_set_the_scale_and_it_says_so(slowest_s: float, said: str) -> None:
    rows = rows_of()
    rows[0]["time/step"] = slowest_s
    axes = charts(rows)["Time per step"]
    assert axes.get_ylim()[1] < 1
    assert axes.get_title("right") == f"▲ up to {said} s"


@pytest.mark.parametrize("num_slow", [0, 10, 40])
def test_nothing_is_cut_where_many_steps_are_slow(num_slow: int) -> None:
    rows = rows_of()
    for row in rows:
        row["time/step"] = 5.0 if row["step"] > 40 - num_slow else 0.5
    axes = charts(rows)["Time per step"]
    assert axes.get_ylim()[1] > max(row["time/step"] for row in rows)
    assert axes.get_title("right") == ""


def test_values_that_span_decades_have_a_logarithmic_scale() -> None:
    rows = rows_of()
    assert "log" not in {axes.get_yscale() for axes in charts(rows).values()}
    for row in rows:
        row["train/kl"] = 1e-5 * 1.3 ** row["step"]
    assert charts(rows)["KL divergences of the policy"].get_yscale() == "log"


def test_a_stack_begins_with_the_first_step_that_has_times() -> None:
    warmup = [{"step": step, "train/loss": 1.0 / (2 - step)} for step in range(-30, 1)]
    axes = charts([*warmup, *rows_of()])["Time per step"]
    assert axes.get_xlim()[0] > -5


def test_steps_of_a_long_run_share_points_and_a_band_shows_how_far_they_go() -> None:
    rows = rows_of(1000)
    rows[500]["reward/mean"] = 7.0
    axes = charts(rows)["Reward"]
    (line,), (band,) = axes.lines, axes.collections
    assert len(line.get_xdata()) == curves.MAX_POINTS
    assert np.max(line.get_ydata()) < 2 < 6.9 < band.get_paths()[0].vertices[:, 1].max()
    assert not charts(rows_of(40))["Reward"].collections
