"""The live view of a run in a terminal: step, phase, reward, speed, mismatch, time left."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmd_rl.report.progress import Metrics, RunProgress, duration, number, sparkline
from spmd_rl.types import samples

_LABELS = 9  # columns
_BESIDE = _LABELS + 6  # of a row: its label, the frame and the space between
# columns that are left free: a terminal writes ^C behind the frame, which must not become a line
_ECHO = 2
_PHASES = {"rollout": "blue", "train": "yellow", "sync": "green", "sleep": "magenta", "wake": "red"}
_OTHER = "bright_black"
_MUCH_GRADING = 0.1  # of the rollout's time
_POLICY = (
    ("rollout/response_tokens_mean", "length {}", ".1f"),
    ("train/entropy", "entropy {}", ".3f"),
    ("train/loss", "loss {}", "+.4f"),
    ("warmup/loss", "loss {}", "+.4f"),
    ("train/grad_norm", "grad norm {}", ".2f"),
    ("train/clip_frac", "clipped {}", ".1%"),
    ("version/lag_max", "lag {}", ".0f"),
    ("memory/gpu_peak_gib", "GPU peak {} GiB", ".1f"),
)


class LiveView:
    """Redraws itself a few times a second until closed; the last state stays on the screen."""

    def __init__(self, progress: RunProgress, title: str, console: Console | None = None) -> None:
        self._progress = progress
        self._title = title
        self._console = console or Console()
        self._shown: samples.Group | None = None
        self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=5)
        self._live.start()

    def show(self, groups: Sequence[samples.Group]) -> None:
        if shown := [group for group in groups if group.num_samples]:
            self._shown = shown[-1]

    def close(self) -> None:
        """Leave the terminal to others; once is enough, and more do no harm."""
        self._live.stop()

    def render(self) -> RenderableType:
        """The whole view as it stands now."""
        progress, frame = self._progress, self._console.width - _ECHO
        width = frame - _BESIDE
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bright_black", width=_LABELS, min_width=_LABELS, no_wrap=True)
        rows.add_column(overflow="fold")
        for label, content in (
            ("now", _phase(progress)),
            ("step time", _time_bar(progress.metrics, width)),
            ("reward", _reward(progress, width)),
            ("mismatch", _mismatch(progress)),
            ("speed", _speed(progress.metrics)),
            ("policy", _known(progress.metrics)),
            ("sample", self._shown and _sample(self._shown, width)),
        ):
            if content:
                rows.add_row(label, content)
        shown = Group(_bar(progress), Text(), rows)
        return Panel(shown, title=self._title, title_align="left", border_style="blue", width=frame)


def _bar(progress: RunProgress) -> Table:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    what, done, total = progress.count
    text = Text.assemble(
        f"{what} ", (f"{done}/{total}", "bold"),
        f"  {duration(progress.elapsed_s)} gone  ", (f"{duration(progress.left_s)} left", "bold"),
    )  # fmt: skip
    row.add_row(ProgressBar(total=max(1, total), completed=done), text)
    return row


def _phase(progress: RunProgress) -> Text:
    if not progress.phase:
        _, done, total = progress.count
        return Text(
            "done" if done >= total else "between phases" if progress.index else "starting",
            style="dim",
        )
    seconds = progress.clock() - progress.phase_since
    return Text.assemble(
        (progress.phase, f"bold {_PHASES.get(progress.phase, _OTHER)}"), f"  {seconds:.1f} s"
    )


def _time_bar(metrics: Metrics, room: int) -> Text | None:
    """The last step's seconds as one bar, a colour a phase, and their shares, below it where `room`
    is short.
    """
    whole, width = metrics.get("time/step", 0.0), max(8, min(40, room - 12))
    if whole <= 0:
        return None
    parts = [(name, metrics.get(f"time/{name}", 0.0), colour) for name, colour in _PHASES.items()]
    parts.append(("other", max(0.0, whole - sum(seconds for _, seconds, _ in parts)), _OTHER))
    bar, words, drawn, passed = Text(), Text(), 0, 0.0
    for name, seconds, colour in parts:
        passed += seconds
        cells = min(width, round(width * passed / whole)) - drawn
        drawn += cells
        bar.append("█" * cells, style=colour)
        if seconds >= 0.01 * whole:
            words.append(f"{name} ", style=colour).append(f"{seconds / whole:.0%}  ")
    bar.append(f"  {whole:.2f} s")
    words.rstrip()
    return Text.assemble(bar, "   " if len(bar) + 3 + len(words) <= room else "\n", words)


def _reward(progress: RunProgress, room: int) -> Text | None:
    """The last step's, the course of all, and the first."""
    if not progress.rewards:
        return None
    first, last = progress.rewards[0], progress.rewards[-1]
    course = sparkline(progress.rewards, max(8, min(48, room - 24)))
    return Text.assemble(
        (number(last, ".3f"), "bold green" if last >= first else "bold red"),
        "  ", (course, "green"), (f"  from {number(first, '.3f')}", "bright_black"),
    )  # fmt: skip


def _mismatch(progress: RunProgress) -> Text | None:
    if "onpolicy/mismatched_tokens" not in progress.metrics:
        return None
    if not progress.compared_tokens:
        return Text(
            "no token was drawn from the weights in training: none to compare", style="yellow"
        )
    of_all = f"{progress.mismatched_tokens:,.0f} of {progress.compared_tokens:,.0f} tokens"
    if not progress.mismatched_tokens:
        return Text(f"{of_all}: trainer and engine agree bit for bit", style="green")
    now = progress.metrics["onpolicy/mismatched_tokens"]
    worst = progress.metrics.get("onpolicy/max_abs_dlogp", float("nan"))
    text = f"{now:,.0f} tokens this step, {of_all} in all, max |Δ log-prob| {worst:.2e}"
    return Text(text, style="bold red")


def _speed(metrics: Metrics) -> Text | None:
    parts = [
        f"{name} {metrics[key]:,.0f} tok/s"
        for name, key in (("rollout", "rollout/tokens_per_s"), ("train", "perf/train_tokens_per_s"))
        if key in metrics
    ]
    share = metrics.get("time/reward", 0.0) / (metrics.get("time/rollout") or math.inf)
    if share >= _MUCH_GRADING:
        parts.append(f"reward function {min(share, 1.0):.0%} of rollout")
    return Text(" · ".join(parts)) if parts else None


def _known(metrics: Metrics) -> Text | None:
    parts = [
        form.format(number(metrics[name], spec)) for name, form, spec in _POLICY if name in metrics
    ]
    return Text(" · ".join(parts)) if parts else None


def _sample(group: samples.Group, room: int) -> Text:
    sample = group.samples[0]
    reward = f"  reward {sample.reward:g}"
    left = max(20, room - len(reward) - 3)  # for the texts: the prompt has two fifths of it
    return Text.assemble(
        (_one_line(group.prompt.text, min(40, left * 2 // 5)), "bright_black"), " → ",
        (_one_line(sample.text, min(60, left * 3 // 5)), "bold"), (reward, "green" if sample.reward > 0 else "red"),
    )  # fmt: skip


def _one_line(text: str, width: int) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= width else "…" + shown[-(width - 1) :]
