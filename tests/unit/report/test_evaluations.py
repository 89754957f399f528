"""Evaluations of a run in its log, its views and its curves."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from spmd_rl.observe.metrics_log import drop_steps_after, read_metrics
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.report.live_view import LiveView
from spmd_rl.report.pictures.curves import picture
from spmd_rl.report.progress import RunProgress, evaluation_text
from spmd_rl.report.run_monitor import RunMonitor
from spmd_rl.report.series import KEY_FIGURES, key_figures
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

SCORES = {
    "eval/reward": 0.25,
    "eval/pass@1": 0.25,
    "eval/gsm/reward": 0.25,
    "eval/gsm/pass@1": 0.25,
    "eval/gsm/pass@4": 0.75,
}


def group() -> Group:
    tokens = np.zeros(1, np.int32)
    sample = Sample(0, 0, tokens, np.zeros(1, np.float32), tokens, "completed", reward=1.0)
    return Group(Prompt(0, tokens), [sample])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(tmp_path / "run", "", {})


def test_an_evaluation_belongs_to_the_step_before_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = RunMonitor(folder, tty=False)
    monitor.begin_steps(2)
    monitor.on_evaluation(0, SCORES, {"gsm": [group()]})
    for step in (1, 2):
        monitor.on_step(step, {"reward/mean": step / 2})
    monitor.on_evaluation(2, SCORES, {"gsm": [group()]})
    monitor.close()
    lines = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert lines == [0, 1, 2, 2]
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [("eval/reward" in row, "reward/mean" in row) for row in rows] == [
        (True, False),
        (False, True),
        (True, True),
    ]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "evaluation after 0 steps  gsm: reward 0.250  pass@4 0.750"
    assert [line.split()[0] for line in out] == ["evaluation", "step", "step", "evaluation"]
    names = {path.name for path in folder.samples.iterdir()}
    assert names == {"eval_gsm_step_00000.jsonl", "eval_gsm_step_00002.jsonl"}
    figure = [one.metric for one in KEY_FIGURES].index("eval/reward")
    assert key_figures(rows)[figure] == key_figures(rows[:1])[figure] == (0.25, None)
    axes = picture(rows, "run").axes
    assert "Evaluation: mean reward" in [one.get_title(loc="left") for one in axes]


class Kept:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def close(self) -> None: ...


def test_sinks_get_the_lines_of_the_log(folder: RunFolder) -> None:
    kept = Kept()
    monitor = RunMonitor(folder, sinks=kept, tty=False)
    monitor.begin_steps(2)
    monitor.on_evaluation(0, SCORES, {})
    for step in (1, 2):
        monitor.on_step(step, {"train/loss": 0.5, "reward/mean": 0.25})
    monitor.close()
    assert kept.rows == read_metrics(folder.metrics)
    assert [row["step"] for row in kept.rows] == [0, 1, 2]


def test_a_resumed_run_keeps_the_evaluation_that_it_starts_with(folder: RunFolder) -> None:
    monitor = RunMonitor(folder, tty=False)
    monitor.begin_steps(3)
    for step in (1, 2, 3):
        monitor.on_evaluation(step - 1, SCORES, {"gsm": [group()]})
        monitor.on_step(step, {"reward/mean": 1.0})
    monitor.close()
    drop_steps_after(folder.metrics, 1)
    folder.drop_samples(after=1)
    assert ["eval/reward" in row for row in read_metrics(folder.metrics)] == [True, True]
    names = sorted(path.name for path in folder.samples.iterdir())
    assert names == ["eval_gsm_step_00000.jsonl", "eval_gsm_step_00001.jsonl"]


def test_the_live_view_shows_the_last_evaluation() -> None:
    progress, console = RunProgress(9), Console(file=io.StringIO(), width=100)
    view = LiveView(progress, "run", console)
    view.close()
    progress.record_evaluation(0, SCORES)
    progress.record_evaluation(7, {**SCORES, "eval/gsm/reward": 0.5})
    with console.capture() as captured:
        console.print(view.render())
    text = captured.get()
    assert "gsm: reward 0.500  pass@4 0.750  after 7 steps  reward from 0.250" in text


def test_one_number_is_not_shown_twice() -> None:
    once = {"eval/gsm/reward": 0.25, "eval/gsm/avg@1": 0.25, "eval/gsm/pass@1": 0.25}
    assert evaluation_text(once) == "gsm: reward 0.250"
    graded = once | {"eval/gsm/pass@1": 0.5}
    assert evaluation_text(graded) == "gsm: reward 0.250  pass@1 0.500"


def test_an_evaluation_whose_samples_all_failed_has_words() -> None:
    assert evaluation_text({"eval/gsm/failed_samples": 3.0}) == "all samples failed"


def test_held_out_scores_are_in_the_views_and_the_curves(folder: RunFolder) -> None:
    first = {"eval/loss": 2.0, "eval/text/loss": 2.0, "eval/text/perplexity": 7.389}
    last = {"eval/loss": 1.0, "eval/text/loss": 1.0, "eval/text/perplexity": 2.718}
    assert evaluation_text(last) == "text: loss 1.000  perplexity 2.718"
    out = io.StringIO()
    progress = RunProgress(2)
    view = LiveView(progress, "run", Console(file=out, force_terminal=True, width=100))
    for step, row in ((0, first), (2, last)):
        progress.record_evaluation(step, row)
        view.show_evaluation()
    view.close()
    assert "loss from 2.000" in out.getvalue()
    rows = [
        {"step": 0, **first},
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": 0.5, **last},
    ]
    axes = picture(rows, "run").axes
    assert "Evaluation: loss of a token" in [one.get_title(loc="left") for one in axes]


def test_the_time_of_an_evaluation_is_a_phase_of_its_step() -> None:
    out = io.StringIO()
    rows = [
        {"step": step, "time/step": 3.0, "time/train": 1.0, "time/eval": 2.0} for step in (1, 2)
    ]
    (axes,) = picture(rows, "run").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["train", "eval", "other"]
    progress = RunProgress(2)
    view = LiveView(progress, "run", Console(file=out, force_terminal=True, width=100))
    progress.record_step(1, rows[0])
    view.show([])
    view.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "eval 67" in shown, shown
