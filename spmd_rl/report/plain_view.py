"""Plain view of a run: one line a step, for logs and pipes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from spmd_rl.report.compared_tokens import mismatch_text
from spmd_rl.report.progress import (
    Metrics,
    RunProgress,
    duration,
    evaluation_text,
    nothing_learned,
    number,
)
from spmd_rl.types.groups import Group

_REWARD = ("reward/mean", "reward {}", ".3f")
_COLUMNS = (
    ("train/loss", "loss {}", "+.4f"),
    ("warmup/loss", "loss {}", "+.4f"),
    ("rollout/tokens_per_s", "{} tok/s", ",.0f"),
    ("time/step", "{} s/step", ".2f"),
    ("time/warmup", "{} s/step", ".2f"),
)


class PlainView:
    """Prints one line for each finished step and each evaluation, and nothing else."""

    def __init__(self, progress: RunProgress, out: TextIO | None = None) -> None:
        self._progress = progress
        self._out = out

    def show(self, groups: Sequence[Group]) -> None:
        print(step_line(self._progress), file=self._out or sys.stdout, flush=True)

    def show_evaluation(self) -> None:
        num_steps, metrics = self._progress.evaluations[-1]
        text = f"evaluation after {num_steps} steps  {evaluation_text(metrics)}"
        print(text, file=self._out or sys.stdout, flush=True)

    def close(self) -> None:
        pass


def step_line(progress: RunProgress) -> str:
    """Return the line of the last step.

    Such as `step  12/150  reward 0.523  mismatched 0 of 5,120  8,123 tok/s  0.37 s/step  ETA 0:51`.
    """
    what, done, total = progress.count
    head = f"{what} {done:>{len(str(total))}}/{total}"
    return "  ".join([head, *_columns(progress.metrics), f"ETA {duration(progress.remaining_s)}"])


def _columns(metrics: Metrics) -> list[str]:
    reward, *others = (
        form.format(number(metrics[name], spec)) if name in metrics else ""
        for name, form, spec in (_REWARD, *_COLUMNS)
    )
    texts = (reward, mismatch_text(metrics), nothing_learned(metrics), *others)
    return [text for text in texts if text]
