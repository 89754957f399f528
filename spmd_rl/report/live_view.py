"""Live view of a run in a terminal: step, phase, reward, mismatch, speed, remaining time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmd_rl.errors import printable
from spmd_rl.report.compared_tokens import NONE_COMPARED, percent
from spmd_rl.report.means import first_and_last
from spmd_rl.report.progress import (
    Metrics,
    RunProgress,
    duration,
    episodes_text,
    evaluation_text,
    nothing_learned,
    number,
    sparkline,
    weights_text,
)
from spmd_rl.report.verdicts.main_scores import main_score
from spmd_rl.types import groups

PAGE_HINT = "report.html in this folder shows more, from step 1 on"
_LABEL_WIDTH = 9
_SIDE_WIDTH = _LABEL_WIDTH + 6  # of a row besides its content: label, frame and space between
_ECHO_WIDTH = 2  # free columns behind the frame, where a terminal echoes ^C
_PHASES = {
    "rollout": "blue",
    "train": "yellow",
    "sync": "green",
    "eval": "cyan",
    "sleep": "magenta",
    "wake": "red",
}
_OTHER = "bright_black"
_MIN_REWARD_SHARE = 0.1  # of the rollout's time, from which it is shown
_POLICY_METRICS = (
    ("rollout/response_tokens_mean", "length {}", ".1f"),
    ("train/entropy", "entropy {}", ".3f"),
    ("train/loss", "loss {}", "+.4f"),
    ("warmup/loss", "loss {}", "+.4f"),
    ("train/grad_norm", "grad norm {}", ".2f"),
    ("train/clip_frac", "clipped {}", ".1%"),
    ("version/lag_max", "lag {}", ".0f"),
    ("rollout/running", "running {}", ".0f"),
    ("rollout/waiting", "waiting {}", ".0f"),
    ("rollout/buffered", "buffered {}", ".0f"),
    ("memory/gpu_peak_gib", "GPU peak {} GiB", ".1f"),
)


class _StepPart(NamedTuple):
    """How long a phase, or the rest, of a step took, and the colour that shows it."""

    name: str
    seconds: float
    colour: str


class LiveView:
    """Redraws itself a few times a second until closed. Its last state stays on the screen."""

    def __init__(self, progress: RunProgress, title: str, console: Console | None = None) -> None:
        self._progress = progress
        self._title = title
        self._console = console or Console()
        self._group: groups.Group | None = None
        self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=5)
        self._live.start()

    def show(self, groups: Sequence[groups.Group]) -> None:
        """Show a sample of the last of these groups that has one."""
        for group in groups:
            if group.num_samples:
                self._group = group

    def show_evaluation(self) -> None:
        """Nothing: the next drawing shows it."""

    def close(self) -> None:
        """Stop drawing, so that others can use the terminal. May be called again."""
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the view of the current state."""
        frame = self._console.width - _ECHO_WIDTH
        rows = self._rows(frame - _SIDE_WIDTH)
        content = Group(_progress_bar(self._progress), Text(), rows)
        return Panel(
            content,
            title=Text(printable(self._title)),
            title_align="left",
            subtitle=PAGE_HINT,
            subtitle_align="left",
            border_style="blue",
            width=frame,
        )

    def _rows(self, width: int) -> Table:
        """Return a table of labels and their texts, without those that have none yet."""
        progress = self._progress
        rows = Table.grid(padding=(0, 2))
        rows.add_column(
            style="bright_black", width=_LABEL_WIDTH, min_width=_LABEL_WIDTH, no_wrap=True
        )
        rows.add_column(overflow="fold")
        for label, text in (
            ("now", _phase(progress)),
            ("episodes", Text(episodes_text(progress.counts))),
            ("step time", _time_bar(progress.metrics, width)),
            ("reward", _reward(progress, width)),
            ("eval", _evaluation(progress)),
            ("mismatch", _mismatch(progress)),
            ("weights", _weights(progress.verified)),
            ("speed", _speed(progress.metrics)),
            ("policy", _policy(progress.metrics)),
            ("sample", self._group and _sample(self._group, width)),
        ):
            if text:
                rows.add_row(label, text)
        return rows


def _progress_bar(progress: RunProgress) -> Table:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    what, done, total = progress.count
    text = Text.assemble(
        f"{what} ",
        (f"{done}/{total}", "bold"),
        f"  {duration(progress.elapsed_s)} elapsed  ",
        (f"{duration(progress.remaining_s)} left", "bold"),
    )
    row.add_row(ProgressBar(total=max(1, total), completed=done), text)
    return row


def _phase(progress: RunProgress) -> Text:
    if not progress.phase:
        _, done, total = progress.count
        idle = "between phases" if progress.index else "starting"
        return Text("done" if done >= total else idle, style="dim")
    seconds = progress.clock() - progress.phase_since
    return Text.assemble(
        (progress.phase, f"bold {_PHASES.get(progress.phase, _OTHER)}"), f"  {seconds:.1f} s"
    )


def _time_bar(metrics: Metrics, width: int) -> Text | None:
    """Return the last step's time as a bar with one colour a phase, and the phases' shares.

    The shares go below the bar if both do not fit in one line.
    """
    whole = metrics.get("time/step", 0.0)
    if whole <= 0:
        return None
    parts = _parts_of_step(metrics, whole)
    bar = _coloured_bar(parts, whole, max(8, min(40, width - 12)))
    bar.append(f"  {whole:.2f} s")
    shares = _shares(parts, whole)
    one_line = len(bar) + 3 + len(shares) <= width
    return Text.assemble(bar, "   " if one_line else "\n", shares)


def _parts_of_step(metrics: Metrics, whole: float) -> list[_StepPart]:
    """Return the phases of the last step, and the rest of it as `other`."""
    parts = [
        _StepPart(name, metrics.get(f"time/{name}", 0.0), colour)
        for name, colour in _PHASES.items()
    ]
    rest = max(0.0, whole - sum(part.seconds for part in parts))
    return [*parts, _StepPart("other", rest, _OTHER)]


def _coloured_bar(parts: Sequence[_StepPart], whole: float, width: int) -> Text:
    """Return a bar in which each part has its share of the width."""
    bar, num_drawn, elapsed_s = Text(), 0, 0.0
    for _, seconds, colour in parts:
        elapsed_s += seconds
        num_cells = min(width, round(width * elapsed_s / whole)) - num_drawn
        num_drawn += num_cells
        bar.append("█" * num_cells, style=colour)
    return bar


def _shares(parts: Sequence[_StepPart], whole: float) -> Text:
    """Return the names of the parts with their shares, from 1 % on."""
    shares = Text()
    for name, seconds, colour in parts:
        if seconds >= 0.01 * whole:
            shares.append(f"{name} ", style=colour).append(f"{seconds / whole:.0%}  ")
    shares.rstrip()
    return shares


def _reward(progress: RunProgress, width: int) -> Text | None:
    """Return the reward of the last step, a sparkline of all steps, and the means of the first and
    the last fifth of them, as the report has them.
    """
    if not progress.rewards:
        return None
    known = [reward for reward in progress.rewards if math.isfinite(reward)]
    first, last = first_and_last(known)
    line = sparkline(known, max(8, min(48, width - 32)))
    return Text.assemble(
        (number(progress.rewards[-1], ".3f"), "bold green" if last >= first else "bold red"),
        "  ",
        (line, "green"),
        (f"  fifths {number(first, '.3f')} → {number(last, '.3f')}", "bright_black"),
    )


def _evaluation(progress: RunProgress) -> Text | None:
    """Return the scores of the last evaluation, and the main score of the first."""
    if not progress.evaluations:
        return None
    (_, first), (num_steps, last) = progress.evaluations[0], progress.evaluations[-1]
    text = Text.assemble(
        (evaluation_text(last), "bold"), (f"  after {num_steps} steps", "bright_black")
    )
    if len(progress.evaluations) > 1 and (score := main_score(first)):
        before = number(first[f"eval/{score}"], ".3f")
        text.append(f"  {score} from {before}", "bright_black")
    return text


def _mismatch(progress: RunProgress) -> Text | None:
    if "onpolicy/mismatched_tokens" not in progress.metrics:
        return None
    if not progress.compared_tokens:
        return Text(NONE_COMPARED, style="yellow")
    counts = f"{progress.mismatched_tokens:,.0f} of {progress.compared_tokens:,.0f} tokens"
    if progress.compared_tokens < progress.drawn_tokens:
        share = percent(progress.compared_tokens / progress.drawn_tokens)
        counts += f" ({share} of the engine's are compared)"
    if not progress.mismatched_tokens:
        return Text(f"{counts}: trainer and engine agree bit for bit", style="green")
    now = progress.metrics["onpolicy/mismatched_tokens"]
    worst = progress.metrics.get("onpolicy/max_abs_dlogp", float("nan"))
    text = f"{now:,.0f} tokens this step, {counts} in all, max |Δ log-prob| {worst:.2e}"
    return Text(text, style="bold red")


def _weights(metrics: Metrics) -> Text | None:
    """Return whether the engine holds the trainer's bits, and what it cost to find out."""
    text, seconds = weights_text(metrics), metrics.get("time/verify", 0.0)
    return Text(f"{text}, {seconds * 1e3:.1f} ms", style="green") if text else None


def _speed(metrics: Metrics) -> Text | None:
    parts = [
        f"{name} {metrics[key]:,.0f} tok/s"
        for name, key in (("rollout", "rollout/tokens_per_s"), ("train", "perf/train_tokens_per_s"))
        if key in metrics
    ]
    share = metrics.get("time/reward", 0.0) / (metrics.get("time/rollout") or math.inf)
    if share >= _MIN_REWARD_SHARE:
        parts.append(f"reward functions {metrics['time/reward']:.1f} s")
    return Text(" · ".join(parts)) if parts else None


def _policy(metrics: Metrics) -> Text | None:
    parts = [
        form.format(number(metrics[name], spec))
        for name, form, spec in _POLICY_METRICS
        if name in metrics
    ]
    if nothing := nothing_learned(metrics):
        parts.insert(0, nothing)
    return Text(" · ".join(parts), "yellow" if nothing else "") if parts else None


def _sample(group: groups.Group, width: int) -> Text:
    sample = group.samples[0]
    reward = f"  reward {sample.reward:g}"
    text_width = max(20, width - len(reward) - 3)  # two fifths of it for the prompt
    asked = group.prompt.question or group.prompt.text
    return Text.assemble(
        (_one_line(asked, min(40, text_width * 2 // 5)), "bright_black"),
        " → ",
        (_one_line(sample.text, min(60, text_width * 3 // 5)), "bold"),
        (reward, "green" if sample.reward > 0 else "red"),
    )


def _one_line(text: str, width: int) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else "…" + line[-(width - 1) :]
