"""Views of a run: plain lines, the live view, the curves, and the monitor that feeds them."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from spmd_rl.observe.metrics_log import drop_steps_after, read_metrics
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.report import run_monitor
from spmd_rl.report.live_view import LiveView
from spmd_rl.report.pictures import curve_painter, curves
from spmd_rl.report.pictures.curve_painter import CurvePainter
from spmd_rl.report.plain_view import step_line
from spmd_rl.report.progress import RunProgress, duration, sparkline, weights_text
from spmd_rl.report.run_monitor import RunMonitor
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.control_texts import COMMANDS, is_harmless
from tests.terminal import screen

METRICS = {
    "reward/mean": 0.5,
    "onpolicy/mismatched_tokens": 0.0,
    "onpolicy/compared_tokens": 5120.0,
    "rollout/tokens_per_s": 8123.4,
    "train/loss": 0.01,
    "time/step": 0.5,
    "time/rollout": 0.3,
    "time/train": 0.15,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def group() -> Group:
    tokens, zeros = np.zeros(4, np.int32), np.zeros(4, np.float32)
    sample = Sample(0, 0, tokens, zeros, tokens, "completed", text="85")
    return Group(Prompt(0, np.array([1], np.int32), "37+48=", "85"), [sample])


def progress(num_steps: int = 10, **metrics: float) -> RunProgress:
    state = RunProgress(num_steps, Clock())
    state.record_step(4, METRICS | metrics)
    return state


def test_durations() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 3723)] == ["-:--", "0:00", "1:00", "1:02:03"]


def test_sparkline_keeps_the_scale_of_a_reward() -> None:
    assert sparkline([0, 0.5, 1], 10) == "▁▅█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert len(sparkline(list(np.linspace(0, 1, 1000)), 40)) == 40
    assert sparkline([-5, 0, 5], 9) == "▁▅█"
    assert sparkline([float("nan")], 9) == ""


def test_time_left_is_the_recent_pace() -> None:
    state = RunProgress(100, Clock())
    assert state.remaining_s is None
    for index in range(1, 31):
        state.record_step(index, {"time/step": 100.0 if index <= 10 else 2.0})
    assert state.remaining_s == 70 * 2.0


def test_a_plain_line() -> None:
    line = step_line(progress())
    assert line == (
        "step  4/10  reward 0.500  mismatched 0 of 5,120  loss +0.0100  8,123 tok/s  0.50 s/step  "
        "ETA 0:03"
    )
    assert step_line(RunProgress(10, Clock())) == "step  0/10  ETA -:--"


def test_a_plain_line_says_nothing_of_mismatches_where_nothing_was_compared() -> None:
    line = step_line(progress(**{"onpolicy/compared_tokens": 0.0}))
    assert line == "step  4/10  reward 0.500  loss +0.0100  8,123 tok/s  0.50 s/step  ETA 0:03"


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.5, "nothing learned: gradient norm 0"),
        (1, "nothing learned: mask_lag left out all tokens"),
    ],
)
def test_a_step_without_a_gradient_says_so_in_both_views(share: float, said: str) -> None:
    empty = {"train/grad_norm": 0.0, "version/masked_share": share}
    state = progress(**empty)
    assert f"  mismatched 0 of 5,120  {said}  loss" in step_line(state)
    assert said in rendered(state, group())
    assert "nothing" not in step_line(progress(**empty | {"train/grad_norm": 1e-30}))


def test_large_numbers_are_short_in_both_views_and_counts_are_written_out() -> None:
    large = {"reward/mean": 1e300, "train/loss": -1.23456e7, "onpolicy/compared_tokens": 5120000.0}
    state = progress(**large, **{"train/grad_norm": 2.5e9})
    line = step_line(state)
    assert "  reward 1e+300  mismatched 0 of 5,120,000  loss -1.235e+07  8,123 tok/s" in line
    view = rendered(state, group())
    assert "1e+300" in view
    assert "loss -1.235e+07 · grad norm 2.5e+09" in view
    assert "000000" not in line + view
    assert "reward 999999.000 " in step_line(progress(**{"reward/mean": 999999.0}))


def test_the_view_says_that_the_engine_holds_the_trainer_s_bits() -> None:
    push = {"sync/tensors": 310.0, "sync/verified_tensors": 310.0, "sync/shared_tensors": 0.0}
    state = progress(**push, **{"time/verify": 0.0021})
    assert "weights" in rendered(state)
    assert "verified: 310 of 310 tensors, 2.1 ms" in rendered(state)
    state.record_step(5, METRICS)  # its push was not compared: the last that was is shown
    assert "verified: 310 of 310 tensors" in rendered(state)
    assert "verified" not in rendered(progress())
    mixed = {"sync/tensors": 1310.0, "sync/verified_tensors": 1300.0, "sync/shared_tensors": 10.0}
    assert weights_text(mixed) == "verified: 1,300 of 1,310 tensors, 10 shared"
    shared = push | {"sync/verified_tensors": 0.0, "sync/shared_tensors": 310.0}
    assert weights_text(shared) == "shared: 310 of 310 tensors are the trainer's memory"


def rendered(state: RunProgress, *groups: Group, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    view = LiveView(state, "runs/demo", console)
    view.show(groups)
    view.close()
    shown = Console(file=io.StringIO(), width=width)
    shown.print(view.render())
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_the_live_view_shows_what_matters() -> None:
    state = progress()
    state.begin_phase("train")
    text = rendered(state, group())
    for expected in (
        "runs/demo",
        "report.html in this folder shows more",
        "step 4/10",
        "0:03 left",
        "train",
        "0.500",
        "8,123 tok/s",
        "0 of 5,120 tokens: trainer and engine agree bit for bit",
        "37+48= → 85",
    ):
        assert expected in text


LABELS = ("now", "step time", "reward", "mismatch", "speed", "policy", "sample")
EVERYTHING = {
    "rollout/response_tokens_mean": 1234.5,
    "train/entropy": 1.234,
    "train/grad_norm": 0.23,
    "train/clip_frac": 0.01,
    "version/lag_max": 1.0,
    "memory/gpu_peak_gib": 120.1,
    "perf/train_tokens_per_s": 123456.0,
    "time/reward": 0.27,
    **{f"time/{phase}": 0.0101 for phase in ("sync", "sleep", "wake")},
}


@pytest.mark.parametrize("width", [80, 84, 100, 160])
def test_the_live_view_is_whole_at_any_usual_width(width: int) -> None:
    state = progress(**EVERYTHING)
    state.rewards = [number / 100 for number in range(101)]
    long = Group(
        replace(group().prompt, text="a question " * 20),
        [group().samples[0].replace(text="so " * 90)],
    )
    text = rendered(state, long, width=width)
    assert "…  reward" not in text.replace("… → …", ""), "the sample's reward is not what is cut"
    lines = text.splitlines()
    assert {len(line) for line in lines} == {width - 2}, "a ^C has its place behind the frame"
    assert [line[2:11].strip() for line in lines if line[2:11].strip() in LABELS] == list(LABELS)
    whole = " ".join(line[13:-2].strip() for line in lines)
    for expected in (
        *(
            "rollout 60%",
            "train 30%",
            "wake 2%",
            "0.50 s",
            "1.000",
            "fifths 0.100 → 0.905",
            "agree bit for bit",
            "reward nan",
        ),
        *(
            "8,123 tok/s",
            "123,456 tok/s",
            "reward functions 0.3 s",
            "GPU peak 120.1 GiB",
            "clipped 1.0%",
        ),
    ):
        assert expected in whole


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_words_of_a_model_do_not_command_the_terminal(command: str) -> None:
    whole = group()
    (sample,) = whole.samples
    prompt = replace(whole.prompt, text=f"Q{command}")
    text = rendered(progress(), Group(prompt, [sample.replace(text=f"A{command}")]))
    assert is_harmless(text)
    assert "Q" in text
    assert "A" in text


def test_the_live_view_shows_where_episodes_are() -> None:
    state = progress()
    assert "outside" not in rendered(state, group())
    state.counts = {"episodes/drawing": 0, "episodes/outside": 0}
    assert "outside" not in rendered(state, group())
    state.counts = {"episodes/drawing": 3, "episodes/outside": 29, "episodes/done": 32}
    assert "3 draw  29 outside  32 done" in rendered(state, group())
    state.counts |= {"episodes/failed/tool": 2, "episodes/failed/timeout": 1}
    assert "32 done  3 failed: tool 2, timeout 1" in rendered(state, group())


def test_the_live_view_leaves_the_terminal_to_last_words() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)
    view = LiveView(progress(), "runs/demo", console)
    console.file.write("^C")  # as a terminal echoes it
    view.close()
    console.file.write("the run was ended\r\n")
    view.show([group()])
    view.close()
    assert isinstance(console.file, io.StringIO)
    lines = screen(console.file.getvalue().replace("\n", "\r\n"), 80)
    assert lines[-2:] == ["the run was ended", ""]
    assert sum("runs/demo" in line for line in lines) == 1, "one frame, and no torn one above it"


def test_the_live_view_shouts_about_a_mismatch() -> None:
    text = rendered(progress(**{"onpolicy/mismatched_tokens": 3.0, "onpolicy/max_abs_dlogp": 0.02}))
    assert "3 tokens this step, 3 of 5,120 tokens in all, max |Δ log-prob| 2.00e-02" in text
    assert "bit for bit" not in text


def test_the_live_view_claims_nothing_where_nothing_was_compared() -> None:
    text = rendered(progress(**{"onpolicy/compared_tokens": 0.0}))
    assert "no tokens compared" in text
    assert "bit for bit" not in text
    assert "nan of 5,120 tokens in all" in rendered(
        progress(**{"onpolicy/mismatched_tokens": float("nan")})
    )


def test_the_live_view_of_a_warm_up() -> None:
    state = RunProgress(0, Clock())
    state.begin_warmup(150)
    assert "warm-up 0/150" in rendered(state)
    state.begin_phase("warm-up")
    state.record_step(-149, {"warmup/loss": 4.5, "time/warmup": 2.0})
    text = rendered(state)
    for expected in ("warm-up 1/150", "4:58 left", "loss +4.5000"):
        assert expected in text
    state.record_step(0, {"warmup/loss": 0.5, "time/warmup": 2.0})
    assert "warm-up 150/150" in rendered(state)
    state.begin_steps(10)
    assert "step 0/10" in rendered(state)
    assert state.remaining_s is None, "the pace of the warm-up says nothing of the steps"


def opened(tmp_path: Path, clock: Clock, **kwargs: Any) -> RunMonitor:
    run = RunFolder.open(tmp_path / "r", "steps = 2\n", {})
    watch = RunMonitor(run, tty=False, clock=clock, **kwargs)
    watch.begin_steps(2)
    return watch


def test_the_observer_times_records_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    watch = opened(tmp_path, clock)
    for _ in range(2):  # a phase may come twice in a step
        watch.on_phase("rollout")
        watch.on_phase("rollout", 0.25)
    clock.now += 2.0
    watch.on_step(1, {"reward/mean": 0.5}, [group()])
    clock.now += 1.0
    watch.on_step(2, {"reward/mean": 0.75})
    watch.close()
    first, second = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert (first["time/rollout"], first["time/step"], first["rollout/tokens_per_s"]) == (0.5, 2, 8)
    assert "time/rollout" not in second
    assert second["time/step"] == 1
    assert capsys.readouterr().out.splitlines()[0].startswith("step 1/2  reward 0.500")
    assert [path.name for path in (tmp_path / "r" / "samples").iterdir()] == ["step_00001.jsonl"]


def test_a_warm_up_is_logged_and_its_time_is_in_the_line_of_step_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    watch = RunMonitor(
        RunFolder.open(tmp_path / "r", "", {}), tty=False, clock=clock, before_s={"eval": 3.0}
    )
    clock.now += 5.0
    watch.begin_warmup(2)
    for number in (-1, 0):
        clock.now += 2.0
        watch.on_step(number, {"warmup/loss": 0.5})
    watch.on_phase("warm-up", 4.0)
    clock.now += 1.0
    watch.begin_steps(2)
    clock.now += 0.5
    watch.on_step(1, {"reward/mean": 0.5})
    watch.on_step(2, {"reward/mean": 0.5})
    watch.close()
    first, last, one, two = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [row["step"] for row in (first, last, one, two)] == [-1, 0, 1, 2]
    assert (first["warmup/loss"], first["time/warmup"], "time/step" in first) == (0.5, 2, False)
    times = {name: value for name, value in one.items() if name.startswith(("before/", "time/"))}
    assert times == {"before/eval": 3, "before/warm-up": 4, "before/all": 10, "time/step": 0.5}
    assert not [name for name in two if name.startswith("before/")]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "warm-up 1/2  loss +0.5000  2.00 s/step  ETA 0:02"
    assert said[2].startswith("step 1/2  reward 0.500")


def test_a_run_that_begins_again_drops_its_warm_up_and_a_resumed_one_keeps_it(
    tmp_path: Path,
) -> None:
    for resume_at, left in ((0, []), (1, [-1, 0, 1])):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(f'{{"step": {step}}}\n' for step in (-1, 0, 1, 2)))
        drop_steps_after(path, resume_at)
        assert [row["step"] for row in read_metrics(path)] == left


def test_the_time_gone_counts_from_where_the_run_began(tmp_path: Path) -> None:
    watch = opened(tmp_path, Clock(), start_unix_s=time.time() - 60.0)
    watch.on_step(1, {})
    watch.close()
    (row,) = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert row["before/all"] >= 60.0


def test_time_spent_on_grading_is_that_of_all_groups(tmp_path: Path) -> None:
    watch = opened(tmp_path, Clock())
    watch.on_step(
        1, {}, [replace(group(), reward_time_s=seconds) for seconds in (0.25, 0.75, 0.75)]
    )
    watch.on_step(2, {}, [group()])
    watch.close()
    first, second = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert first["time/reward"] == 1.75
    assert "time/reward" not in second


@pytest.mark.parametrize(("lag", "rate"), [(0.0, 4 / 0.5), (1.0, 4 / 2.0)])
def test_samples_made_during_training_are_counted_by_the_whole_step(
    tmp_path: Path, lag: float, rate: float
) -> None:
    clock = Clock()
    watch = opened(tmp_path, clock)
    watch.on_phase("rollout", 0.5)
    clock.now += 2.0
    watch.on_step(1, {}, [group()], lambda: {"version/lag_max": lag})
    watch.on_step(2, {}, [group()], lambda: {"version/lag_max": lag})  # learns from them again
    watch.close()
    first, second = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert first["rollout/tokens_per_s"] == rate
    assert "rollout/tokens_per_s" not in second


def test_a_step_is_written_when_there_is_time_or_the_next_one_ends(tmp_path: Path) -> None:
    clock = Clock()
    watch = opened(tmp_path, clock)

    def written() -> list[int]:
        return [row["step"] for row in read_metrics(tmp_path / "r" / "metrics.jsonl")]

    clock.now += 1.0
    watch.on_step(1, {"reward/mean": 0.5})
    assert written() == []
    watch.on_step(2, {"reward/mean": 0.75})
    assert written() == [1]
    watch.catch_up()
    watch.catch_up()
    assert written() == [1, 2]
    watch.close()


def test_the_view_is_closed_though_the_last_step_cannot_be_written(
    tmp_path: Path, monkeypatch
) -> None:
    clock, closed = Clock(), []
    watch = opened(tmp_path, clock)
    monkeypatch.setattr(run_monitor.PlainView, "close", lambda self: closed.append(True))
    watch.on_step(1, {}, more_metrics=lambda: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        watch.close()
    assert closed


def test_the_observer_continues_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[int]] = []
    monkeypatch.setattr(
        curve_painter, "draw", lambda rows, *_: drawn.append([row["step"] for row in rows])
    )
    watch = opened(tmp_path, Clock())
    watch.on_step(1, {})
    watch.on_step(2, {})
    watch.close()
    del watch  # the folder is one run's at a time
    again = opened(tmp_path, Clock(), resume_at=1)
    again.on_step(2, {})
    again.close()
    assert drawn == [[1, 2], [1, 2]]


def test_a_plot_is_asked_for_every_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    metrics = tmp_path / "r" / "metrics.jsonl"
    monkeypatch.setattr(
        run_monitor.CurvePainter,
        "request",
        lambda _: asked.append(read_metrics(metrics)[-1]["step"]),
    )
    monkeypatch.setattr(run_monitor.CurvePainter, "finish", lambda self, rows: None)
    watch = opened(tmp_path, Clock(), plot_every_steps=3)
    for index in range(1, 8):
        watch.on_step(index, {})
    watch.close()
    assert asked == [1, 3, 6]


def test_curves_are_drawn_whatever_is_missing(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "reward/mean": None},
        {"step": 2, "train/loss": 0.5, "onpolicy/mismatched_tokens": 3},
    ]
    curves.draw(rows, tmp_path / "curves.png", "runs/demo")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    curves.draw([], tmp_path / "none.png", "")
    curves.draw([{"step": 1, "reward/mean": None}], tmp_path / "none.png", "")
    assert not (tmp_path / "none.png").exists()


def test_a_warm_up_is_no_step_of_the_picture() -> None:
    rows = [{"step": step, "warmup/loss": 0.5 - step} for step in (-1, 0)]
    assert curves.picture(rows, "") is None
    rows += [{"step": step, "train/loss": step, "reward/mean": 0.5} for step in (1, 2, 3)]
    drawn = [axes.lines[0].get_xdata().tolist() for axes in curves.picture(rows, "").axes]
    assert drawn == [[1, 2, 3]] * 2


def test_the_live_view_shows_what_runs_waits_and_is_buffered() -> None:
    text = rendered(
        progress(**{"rollout/running": 64, "rollout/waiting": 12, "rollout/buffered": 7})
    )
    assert "running 64 · waiting 12 · buffered 7" in " ".join(text.split())


def test_a_picture_is_drawn_by_a_process_of_its_own(tmp_path: Path) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    metrics.write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 0.75}\n')
    clock = Clock()
    painter = CurvePainter(metrics, picture, "run", clock)
    painter.request()
    child = painter._process
    assert child is not None
    clock.now += curve_painter.LEAST_S
    painter.request()
    assert painter._process is child, "one drawing at a time"
    assert child.wait() == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"metrics.jsonl", "curves.png", "report.html"}
    painter.request()
    assert painter._process is not child
    following = painter._process
    assert following is not None
    assert following.wait() == 0
    painter.request()
    assert painter._process is following, "not so soon after the last"


def test_a_disk_that_takes_no_picture_is_said_at_the_end_not_in_between(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
    painter = CurvePainter(metrics, tmp_path / "missing" / "curves.png", "run")
    painter.request()
    with pytest.raises(OSError, match="missing"):
        painter.finish([{"step": 1, "reward/mean": 0.5}])


def test_a_drawing_that_is_killed_leaves_no_file_behind(tmp_path: Path) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
    painter = CurvePainter(metrics, picture, "run")
    painter.request()
    for name in ("curves.png", "report.html"):  # as if the process had begun to write
        (tmp_path / f"{name}.0123456789abcdef.part").touch()
    painter.finish([{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}])
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "curves.png"}
