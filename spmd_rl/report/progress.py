"""Progress of a run, as numbers and short texts that both terminal views show."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spmd_rl.report.verdicts.main_scores import MAIN_SCORES

Metrics = Mapping[str, float]

_BARS = "▁▂▃▄▅▆▇█"
LARGE = 1e6
EPISODES = "episodes/"  # begins the names of what ranks count of their episodes
EPISODE_STATES = {"drawing": "draw", "outside": "outside", "done": "done"}
_RECENT = 20  # steps from which the remaining time is estimated


@dataclass
class RunProgress:
    """Progress of a run so far. `index` is the last finished step, below 1 in a warm-up.

    Units: `clock` is in seconds. The run had lasted `elapsed_before_s` when this was created.
    """

    num_steps: int
    clock: Callable[[], float] = time.monotonic
    index: int = 0
    num_warmup: int = 0
    elapsed_before_s: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    verified: Metrics = field(default_factory=dict)  # of the last step with a verified push
    rewards: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    mismatched_tokens: float = 0
    compared_tokens: float = 0
    drawn_tokens: float = 0  # by engines
    evaluations: list[tuple[int, Metrics]] = field(default_factory=list)
    counts: Mapping[str, int] = field(default_factory=dict)  # of all ranks, now
    phase: str = ""
    phase_since: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.clock() - self.elapsed_before_s

    def begin_warmup(self, num_steps: int) -> None:
        self.num_warmup, self.index = num_steps, -num_steps

    def begin_steps(self, num_steps: int) -> None:
        self.num_steps, self.index, self.step_times_s = num_steps, max(self.index, 0), []

    def begin_phase(self, name: str) -> None:
        self.phase, self.phase_since = name, self.clock()

    def end_phase(self) -> None:
        self.phase = ""

    def record_step(self, index: int, metrics: Metrics) -> None:
        """Add a finished step. Steps of a warm-up count from `1 - num_warmup` to 0."""
        self.index, self.metrics = index, metrics
        if weights_text(metrics):
            self.verified = metrics
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        self.step_times_s += [
            metrics[name] for name in ("time/step", "time/warmup") if name in metrics
        ]
        self.mismatched_tokens += metrics.get("onpolicy/mismatched_tokens", 0)
        self.compared_tokens += metrics.get("onpolicy/compared_tokens", 0)
        self.drawn_tokens += metrics.get("onpolicy/drawn_tokens", 0)

    def record_evaluation(self, num_steps: int, metrics: Metrics) -> None:
        """Keep what an evaluation of the weights after `num_steps` steps found."""
        self.evaluations.append((num_steps, metrics))

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the end of the run or warm-up, at the pace of the last steps.

        None before the first step.
        """
        recent, (_, done, total) = self.step_times_s[-_RECENT:], self.count
        return (total - done) * sum(recent) / len(recent) if recent else None

    @property
    def count(self) -> tuple[str, int, int]:
        """What is counted, how many are done, and how many there are."""
        if self.num_warmup and not self.num_steps:
            return "warm-up", self.num_warmup + self.index, self.num_warmup
        return "step", self.index, self.num_steps


def episodes_text(counts: Mapping[str, int]) -> str:
    """Return where the episodes are; "" where none was played.

    Such as `3 draw  29 outside  32 done  1 failed: tool 1`.
    """
    found = {
        name.removeprefix(EPISODES): value
        for name, value in counts.items()
        if name.startswith(EPISODES)
    }
    if not any(found.values()):
        return ""
    parts = [f"{found.get(name, 0)} {told}" for name, told in EPISODE_STATES.items()]
    kinds = [(name.removeprefix("failed/"), n) for name, n in found.items() if "/" in name]
    if failed := sum(n for _, n in kinds):
        parts.append(f"{failed} failed: " + ", ".join(f"{name} {n}" for name, n in kinds))
    return "  ".join(parts)


def number(value: float, spec: str) -> str:
    """Format `value` by `spec`, or with four digits if it is large.

    A count, whose spec has a comma, is always written out.
    """
    return f"{value:.4g}" if abs(value) > LARGE and "," not in spec else format(value, spec)


def duration(seconds: float | None) -> str:
    """Return a time as in `0:07`, `12:03`, `1:02:03`, or `-:--` if unknown."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return `values` as at most `width` bars, each the mean of neighbouring values.

    The scale is [0, 1], and wider if the values are.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    means = _neighbour_means(known, min(width, len(known)))
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(_BARS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def _neighbour_means(values: Sequence[float], num: int) -> list[float]:
    """Return the means of `num` consecutive parts of about equal length."""
    edges = [i * len(values) // num for i in range(num + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def evaluation_text(metrics: Metrics) -> str:
    """Return the scores of an evaluation: those of each set, or a score of the few that there are.

    Such as `gsm: reward 0.512  pass@4 0.803`.
    """
    scores: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        _, _, rest = name.partition("/")
        one, slash, score = rest.rpartition("/")
        if slash and (score in MAIN_SCORES or score.startswith("pass@") or score == "perplexity"):
            scores.setdefault(one, {})[score] = value
    texts = []
    for one, found in scores.items():
        last, value = list(found.items())[-1]
        if "reward" in found:
            reward = {"reward": found["reward"]}
            # pass@1 of rewards of 0 and 1 is the same number
            found = reward if value == found["reward"] else reward | {last: value}
        listed = "  ".join(f"{score} {number(value, '.3f')}" for score, value in found.items())
        texts.append(f"{one}: {listed}")
    return "  ".join(texts) or "all samples failed"


def nothing_learned(metrics: Metrics) -> str:
    """Return that a step had no gradient, and why if that is known; "" where it had one."""
    if metrics.get("train/grad_norm") != 0:
        return ""
    masked = metrics.get("version/masked_share") == 1
    return f"nothing learned: {'mask_lag left out all tokens' if masked else 'gradient norm 0'}"


def weights_text(metrics: Metrics) -> str:
    """Return how the weights of the engine were found to be the trainer's; "" if unknown."""
    names = ("sync/tensors", "sync/verified_tensors", "sync/shared_tensors")
    if not all(name in metrics for name in names):
        return ""
    total, verified, shared = (f"{metrics[name]:,.0f}" for name in names)
    if metrics["sync/shared_tensors"] == metrics["sync/tensors"]:
        return f"shared: {shared} of {total} tensors are the trainer's memory"
    text = f"verified: {verified} of {total} tensors"
    return f"{text}, {shared} shared" if metrics["sync/shared_tensors"] else text
