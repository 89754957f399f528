"""`curves.png`: its panels, their titles, scales and legends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from spmd_rl.report import colours, curves
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


def panels(rows: list[Row], *, laid_out: bool = False) -> dict[str, Any]:
    """The axes by the title. Only those that are laid out, which takes a while, have extents."""
    figure = curves.picture(rows, "runs/demo")
    if laid_out:
        figure.draw_without_rendering()
    return {axes.get_title("left"): axes for axes in figure.axes if axes.get_title("left")}


def right_of(axes: Any) -> Any:
    """The second scale in the same place."""
    return next(
        other
        for other in axes.figure.axes
        if other is not axes and other.bbox.bounds == axes.bbox.bounds
    )


def places(drawn: dict[str, Any]) -> list[tuple[int, int]]:
    specs = [axes.get_subplotspec() for axes in drawn.values()]
    return [(spec.rowspan.start, spec.colspan.start) for spec in specs]


def test_a_run_has_six_panels_and_no_title_runs_out_of_its_own() -> None:
    drawn = panels(rows_of(onpolicy__compared_tokens=123_456_789), laid_out=True)
    assert list(drawn) == [
        "reward",
        "response length",
        "mismatched tokens: 0 of 4,938,271,560",
        "loss and entropy",
        "seconds a step",
        "tokens per second",
    ]
    assert places(drawn) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for axes in drawn.values():
        titles = [
            text.get_window_extent()
            for text in (axes._left_title, axes._right_title)
            if text.get_text()
        ]
        assert titles[0].x0 >= axes.bbox.x0 - 1
        assert titles[-1].x1 <= axes.bbox.x1 + 1
        assert len(titles) == 1 or not titles[0].overlaps(titles[1])


def test_panels_without_data_are_left_out_and_the_rest_laid_out_anew() -> None:
    drawn = panels(supervised())
    assert list(drawn) == [
        "mismatched tokens: no tokens compared",
        "loss and entropy",
        "seconds a step",
        "tokens per second",
    ]
    assert places(drawn) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert curves.picture([{"step": 1, "reward/mean": None}], "") is None


def test_what_a_reward_returns_beside_it_has_a_panel() -> None:
    drawn = panels(rows_of(reward__form=0.5, reward__late=2.0))
    assert list(drawn)[-1] == "reward parts"
    assert [text.get_text() for text in drawn["reward parts"].get_legend().get_texts()] == [
        "form",
        "late",
    ]
    many = {f"reward__a_part_with_a_long_name_{i}": float(i) for i in range(6)}
    axes = panels(rows_of(**many), laid_out=True)["reward parts: 4 of 6"]
    assert len(axes.get_legend().get_texts()) == 4
    assert axes.get_legend().get_window_extent().x1 <= axes.bbox.x1 + 15


def test_no_line_says_agreement_where_no_token_was_compared() -> None:
    assert not panels(supervised())["mismatched tokens: no tokens compared"].lines
    once = rows_of(onpolicy__compared_tokens=0)
    once[0]["onpolicy/compared_tokens"] = 5120
    (line,) = panels(once)["mismatched tokens: 0 of 5,120"].lines
    assert np.isfinite(line.get_ydata()).tolist() == [True] + 39 * [False]
    assert line.get_marker() == "o"  # or one step of 40 would not be seen


def test_mismatched_tokens_are_counted_in_red() -> None:
    (axes,) = [
        axes
        for title, axes in panels(rows_of(onpolicy__mismatched_tokens=3)).items()
        if "mismatched" in title
    ]
    assert axes.get_title("left") == "mismatched tokens: 120 of 204,800"
    assert axes.lines[0].get_color() == colours.RED.code
    assert axes.get_ylim() == (0, pytest.approx(3.3))


def test_legends_name_every_line_and_hide_no_data() -> None:
    for title, axes in panels(rows_of(onpolicy__mismatched_tokens=3), laid_out=True).items():
        legend = axes.get_legend()
        box, named = legend.get_window_extent(), [text.get_text() for text in legend.get_texts()]
        assert box.y0 >= axes.bbox.y1, title
        assert not box.overlaps(axes._left_title.get_window_extent()), title
        assert box.x1 <= axes.bbox.x1 + 15, title
        expected = {"seconds a step": 6, "reward": 3}.get(title, 2)
        assert len(named) == expected, named


@pytest.mark.parametrize(("slowest_s", "said"), [(1.234, "1.23"), (30.0, "30"), (1234.4, "1,234")])
def test_a_few_slow_steps_do_not_set_the_scale_and_it_says_so(slowest_s: float, said: str) -> None:
    rows = rows_of()
    rows[0]["time/step"] = slowest_s
    axes = panels(rows)["seconds a step"]
    assert axes.get_ylim()[1] < 1
    assert axes.get_title("right") == f"▲ up to {said} s"


@pytest.mark.parametrize("num_slow", [0, 10, 40])
def test_nothing_is_cut_where_many_steps_are_slow(num_slow: int) -> None:
    rows = rows_of()
    for row in rows:
        row["time/step"] = 5.0 if row["step"] > 40 - num_slow else 0.5
    axes = panels(rows)["seconds a step"]
    assert axes.get_ylim()[1] > max(row["time/step"] for row in rows)
    assert axes.get_title("right") == ""


def test_a_steady_entropy_stays_below_the_frame() -> None:
    axes = panels(rows_of(train__entropy=2.2))["loss and entropy"]
    assert right_of(axes).get_ylim() == (0, pytest.approx(2.42))


def test_a_scale_at_the_right_only_where_something_is_on_it() -> None:
    rows = rows_of()
    assert right_of(panels(rows)["response length"]).yaxis.get_visible()
    for row in rows:
        del row["rollout/truncated"]
    assert not right_of(panels(rows)["response length"]).yaxis.get_visible()
