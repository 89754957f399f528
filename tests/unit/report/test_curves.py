"""`curves.png`: its panels, their titles, scales and legends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from spmd_rl.report.pictures import colours, curves
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


def title_of(rows: list[Row]) -> str:
    return str(curves.picture(rows, "demo").get_suptitle())


def test_a_run_has_a_panel_for_all_that_moves_and_no_hole() -> None:
    drawn = panels(rows_of(), laid_out=True)
    assert list(drawn) == [
        "reward",
        "response length",
        "loss and entropy",
        "seconds a step",
        "tokens per second",
    ]
    assert places(drawn) == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 3)]
    for axes in drawn.values():
        titles = [
            text.get_window_extent()
            for text in (axes._left_title, axes._right_title)
            if text.get_text()
        ]
        assert titles[0].x0 >= axes.bbox.x0 - 1
        assert titles[-1].x1 <= axes.bbox.x1 + 1
        assert len(titles) == 1 or not titles[0].overlaps(titles[1])


@pytest.mark.parametrize("num_panels", range(1, 12))
def test_panels_fill_every_row(num_panels: int) -> None:
    sizes = curves._rows_of(num_panels)
    assert sum(sizes) == num_panels
    assert max(sizes) <= 3
    assert max(sizes) - min(sizes) <= 1


def test_the_title_is_the_name_with_the_count_of_mismatched_tokens() -> None:
    many = rows_of(onpolicy__compared_tokens=123_456_789)
    assert title_of(many) == "demo · 0 of 4,938,271,560 tokens mismatched"
    assert title_of(rows_of(onpolicy__mismatched_tokens=3)) == (
        "demo · 120 of 204,800 tokens mismatched"
    )
    assert title_of(supervised()) == "demo · no tokens compared"
    assert title_of([{"step": 1, "train/loss": 1.0}]) == "demo"


def test_panels_without_data_are_left_out_and_the_rest_laid_out_anew() -> None:
    drawn = panels(supervised())
    assert list(drawn) == ["loss and entropy", "seconds a step", "tokens per second"]
    assert places(drawn) == [(0, 0), (0, 1), (0, 2)]
    assert curves.picture([{"step": 1, "reward/mean": None}], "") is None


def test_flat_lines_have_no_panel() -> None:
    flat = {"rollout__response_tokens_mean": 3.0, "rollout__truncated": 0.0}
    assert "response length" not in panels(rows_of(**flat))
    cut = rows_of(rollout__response_tokens_mean=3.0)
    assert "response length" in panels(cut), "the share of truncated ones moves"
    assert "reward" in panels(rows_of(reward__mean=0.5)), "that a reward stands still is news"
    alone = [{"step": step, "train/lr": 1e-3, "train/loss": 2.0} for step in (1, 2)]
    assert list(panels(alone)) == ["loss"], "rather a flat line than none"


def test_a_loss_that_is_rounding_is_no_line() -> None:
    rows = rows_of(train__loss=3e-9)
    rows[3]["train/loss"] = -1e-8
    assert "loss and entropy" not in panels(rows)
    assert len(panels(rows)["entropy"].lines) >= 1


def test_the_divergence_from_a_reference_has_a_panel() -> None:
    rows = rows_of()
    assert "KL divergence" not in panels(rows)
    for row in rows:
        row["train/kl"] = row["step"] / 100
    assert "KL divergence" in panels(rows)


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
    drawn = panels(rows)
    assert list(drawn) == ["pairs ranked as labelled", "rewards of pairs", "loss"]
    axes = drawn["rewards of pairs"]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["margin", "chosen", "rejected"]
    assert len({line.get_color() for line in axes.lines}) == 3


def named_in(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_what_a_reward_returns_beside_it_has_a_panel() -> None:
    rows = rows_of(reward__late=2.0)
    for row in rows:
        row["reward/form"] = row["step"] / 40
    drawn = panels(rows)
    assert list(drawn)[-1] == "reward parts"
    assert named_in(drawn["reward parts"]) == ["form", "late"]


def test_parts_on_top_of_each_other_are_told_apart() -> None:
    """Four parts of one grader: two are equal, and two nearly so."""
    rows = rows_of()
    names = ("strict_prompt", "loose_prompt", "strict_share", "loose_share")
    for row in rows:
        grown = row["step"] / 40
        row |= {f"reward/{name}": grown for name in names[:2]}
        row |= {f"reward/{name}": grown + i / 1000 for i, name in enumerate(names[2:], 1)}
    axes = panels(rows)["reward parts"]
    assert named_in(axes) == ["loose_prompt = strict_prompt", "loose_share", "strict_share"]
    styles = {(line.get_color(), line.get_linestyle(), line.get_linewidth()) for line in axes.lines}
    assert len(styles) == 3
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(widths, reverse=True), "a later line leaves an earlier one to be seen"


@pytest.mark.parametrize("length", [3, 12, 30, 49, 90])
def test_legends_are_whole_whatever_the_names(length: int) -> None:
    names = [f"{i}{'x' * (length - 1)}" for i in range(4)]
    rows = rows_of(train__kl=0.5)
    for row in rows:
        row |= {f"reward/{name}": row["step"] / (40 + i) for i, name in enumerate(names)}
    axes = panels(rows, laid_out=True)["reward parts"]
    assert ["".join(label.split()) for label in named_in(axes)] == names
    box, title = axes.get_legend().get_window_extent(), axes._left_title.get_window_extent()
    assert box.x1 <= axes.figure.bbox.x1
    assert box.y0 >= axes.bbox.y1
    assert not box.overlaps(title)
    assert title.y1 <= axes.figure.bbox.y1


def test_mismatched_tokens_are_counted_in_red() -> None:
    assert "mismatched tokens" not in panels(rows_of())
    drawn = panels(rows_of(onpolicy__mismatched_tokens=3))["mismatched tokens"]
    assert drawn.lines[0].get_color() == colours.RED.code
    assert drawn.get_ylim() == (0, pytest.approx(3.3))


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
