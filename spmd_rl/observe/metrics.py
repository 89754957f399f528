"""The names of metrics, what they mean and in which unit, and the file they are written to."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.observe.files import naming, open_to_append, write_whole
from spmd_rl.observe.jsonl import lines, parse_finite


@dataclass(frozen=True)
class Metric:
    """A name with its unit ("" for a plain ratio or count), a chart's title and one line on what it
    says.
    """

    name: str
    unit: str
    label: str
    meaning: str


# beside these, reward/NAME is the mean of what a reward function's dict calls NAME; the line of
# step 1 has the seconds
# before it: before/all since the run began, before/NAME in a phase of that name
METRICS = (
    Metric("reward/mean", "", "Reward", "mean reward of the step's samples"),
    Metric("reward/std", "", "Spread of rewards", "standard deviation of the step's rewards"),
    Metric(
        "reward/solve_none",
        "",
        "Prompts without a reward above 0",
        "share of prompts no sample of which was rewarded above 0",
    ),
    Metric(
        "reward/solve_all",
        "",
        "Prompts with rewards of 1 only",
        "share of prompts all samples of which were rewarded with 1 or more",
    ),
    Metric(
        "reward/skipped_samples",
        "samples",
        "Samples left out",
        "samples that could not be graded, and were left out",
    ),
    Metric(
        "reward/skipped_groups",
        "prompts",
        "Prompts left out",
        "prompts left without two samples to compare, and left out",
    ),
    Metric(
        "rollout/tokens_per_s",
        "tokens/s",
        "Speed of the rollout",
        "generated tokens per second of rollout; of the whole step, where it goes on during training",
    ),
    Metric("rollout/response_tokens_mean", "tokens", "Response length", "mean response length"),
    Metric("rollout/truncated", "", "Truncated responses", "share of responses cut at max_tokens"),
    Metric(
        "onpolicy/mismatched_tokens",
        "tokens",
        "Mismatched tokens",
        "tokens whose trainer and engine log-probs differ in any bit",
    ),
    Metric(
        "onpolicy/compared_tokens",
        "tokens",
        "Compared tokens",
        "tokens whose log-probs were compared",
    ),
    Metric(
        "onpolicy/max_abs_dlogp",
        "nats",
        "Largest log-prob difference",
        "largest |trainer - engine| log-prob of a token",
    ),
    Metric(
        "onpolicy/mean_abs_dlogp",
        "nats",
        "Mean log-prob difference",
        "mean |trainer - engine| log-prob of a token",
    ),
    Metric(
        "onpolicy/k1",
        "nats",
        "KL divergence, k1 estimate",
        "k1 estimate of KL(engine || trainer) a token, whose exp is the ratio of perplexities",
    ),
    Metric("onpolicy/k3", "nats", "KL divergence, k3 estimate", "k3 estimate of the same"),
    Metric(
        "onpolicy/chi2",
        "",
        "Chi-square divergence",
        "mean square of the ratio trainer / engine of a token, less 1",
    ),
    Metric(
        "onpolicy/ess",
        "",
        "Effective sample size",
        "effective sample size under these ratios, as a share of the tokens",
    ),
    Metric("train/loss", "", "Loss", "loss of the step, over its global denominator"),
    Metric("train/grad_norm", "", "Gradient norm", "norm of the whole gradient before clipping"),
    Metric("train/entropy", "nats", "Entropy", "mean entropy of the policy per response token"),
    Metric("train/clip_frac", "", "Clip fraction", "share of tokens whose ratio was clipped"),
    Metric("train/lr", "", "Learning rate", "learning rate of the step"),
    Metric(
        "train/tokens", "tokens", "Trained tokens", "tokens of the step's batch, prompts included"
    ),
    Metric("warmup/loss", "", "Loss of the warm-up", "loss of a step before step 1"),
    Metric("time/warmup", "s", "Time per warm-up step", "whole step before step 1"),
    Metric("time/step", "s", "Time per step", "whole step"),
    Metric(
        "time/rollout",
        "s",
        "Time of the rollout",
        "generating and grading; only the wait for it, where it goes on during training",
    ),
    Metric(
        "time/reward",
        "s",
        "Time of the reward function",
        "of rollout, the reward function; of the rank of the engine where that took longest",
    ),
    Metric("time/train", "s", "Time of training", "forward, backward, optimiser"),
    Metric("time/sync", "s", "Time of the weight sync", "weights from trainer to engine"),
    Metric("time/sleep", "s", "Time to give memory back", "giving memory back"),
    Metric("time/wake", "s", "Time to take memory again", "taking memory again"),
    Metric(
        "time/save",
        "s",
        "Time to copy a checkpoint",
        "copying a checkpoint; writing it goes on behind the steps",
    ),
    Metric(
        "perf/train_tokens_per_s",
        "tokens/s",
        "Speed of training",
        "trained tokens per second of training",
    ),
    Metric("perf/mfu", "", "Model FLOPs utilisation", "model FLOPs over the device's dense peak"),
    Metric(
        "perf/controller_share",
        "",
        "Controller's share of the step",
        "share of the step in which no worker had work",
    ),
    Metric(
        "memory/gpu_peak_gib",
        "GiB",
        "Peak device memory",
        "device memory in use after training, by whomever; the highest of all ranks",
    ),
    Metric(
        "version/lag_mean",
        "versions",
        "Mean age of the tokens",
        "mean age of the step's tokens in weight versions",
    ),
    Metric(
        "version/lag_max",
        "versions",
        "Age of the oldest token",
        "age of the step's oldest token in weight versions",
    ),
)

KNOWN = {metric.name: metric for metric in METRICS}


class MetricsLog:
    """`metrics.jsonl`: one line a step, in the file once `write` returns.

    A value that is not finite is written as null, with a warning: JSON has no NaN, and a reader
    must not mistake one for a number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_to_append(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append the line of `step`, with the time of writing as `unix_s`; the row as
        `read_metrics` gives it.

        Raises: DataError for a metric that is no number, or has a name that a line has already.
        """
        try:
            bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        except TypeError:
            raise DataError(
                f"step {step}", f"logged what is no number: {', '.join(_no_numbers(metrics))}"
            ) from None
        if bad:
            warnings.warn(
                f"step {step}: not a finite number, written as null: {', '.join(bad)}", stacklevel=2
            )
        row: dict[str, Any] = {"step": step, "unix_s": round(time.time(), 3)}
        if taken := row.keys() & metrics.keys():
            raise DataError(
                f"step {step}",
                f"logged {min(taken)!r}, which each line has already: choose another name",
            )
        row |= {name: None if name in bad else _number(value) for name, value in metrics.items()}
        with naming(self.path):
            self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())
            self._file.flush()
        return row

    def close(self) -> None:
        self._file.close()


def _no_numbers(metrics: Mapping[str, object]) -> Iterator[str]:
    for name, value in metrics.items():
        try:
            math.isfinite(value)  # type: ignore[arg-type]
        except TypeError:
            yield f"{name} ({type(value).__name__})"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` as dicts.

    A damaged line is skipped with a warning: the other steps are whole. A last line that was cut
    short is left out.
    """
    rows = []
    for number, line in lines(path) if path.exists() else ():
        if line.endswith(b"\n"):
            try:
                rows.append(_row(f"{path}:{number}", line))
            except DataError as error:
                warnings.warn(f"{error}; this line is skipped", stacklevel=2)
    return rows


def holds_steps(path: Path) -> bool:
    """Whether there is a step from 1, or a line that cannot be read. A run begins a warm-up alone
    again.
    """
    try:
        return path.exists() and any(_row(str(path), line)["step"] > 0 for _, line in lines(path))
    except DataError:
        return True


def _row(where: str, line: bytes) -> dict[str, Any]:
    row = parse_finite(where, line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(where, "not the metrics of a step")
    return row


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after `step`, which a resumed run will write again; of a run that begins anew,
    all.
    """
    kept = [json.dumps(row) + "\n" for row in read_metrics(path) if 0 < step >= row["step"]]
    write_whole(path, "".join(kept))


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
