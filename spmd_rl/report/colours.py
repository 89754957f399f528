"""Colours of metrics and phases, which `curves.png` and the report page share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """A colour for matplotlib, and the variable of the style sheet that holds it on the page."""

    code: str
    variable: str


BLUE, AMBER = Colour("#2667c9", "--c0"), Colour("#d9822b", "--c1")
GREEN, VIOLET = Colour("#2a9d6f", "--c2"), Colour("#7a5cc2", "--c3")
TEAL = Colour("#1596a8", "--c5")
RED, GREY = Colour("#d1495b", "--c4"), Colour("#a7b1ba", "--rest")

PHASES = {
    "rollout": BLUE,
    "train": AMBER,
    "sync": GREEN,
    "sleep": VIOLET,
    "wake": RED,
    "eval": TEAL,
    "other": GREY,
}
PARTS = (BLUE, AMBER, GREEN, VIOLET)  # of the parts of a reward, in the order of their names

_OTHERS = {
    "reward/solve_all": GREEN,
    "reward/solve_none": GREY,
    "reward/failed_groups": AMBER,
    "rollout/truncated": AMBER,
    "rollout/buffered": GREEN,
    "rollout/rejected": RED,
    "rollout/surplus": AMBER,
    "time/queue_mean": GREY,
    "time/prefill_mean": AMBER,
    "time/grading_mean": GREEN,
    "time/request_max": VIOLET,
    "onpolicy/mismatched_tokens": RED,
    "onpolicy/compared_tokens": GREEN,
    "onpolicy/drawn_tokens": AMBER,
    "onpolicy/max_abs_dlogp": VIOLET,
    "onpolicy/mean_abs_dlogp": BLUE,
    "onpolicy/k1": AMBER,
    "onpolicy/k3": GREEN,
    "onpolicy/chi2": AMBER,
    "train/entropy": AMBER,
    "sync/verified_tensors": GREEN,
    "sync/shared_tensors": VIOLET,
    "perf/train_tokens_per_s": AMBER,
    "perf/controller_share": AMBER,
    "version/lag_max": AMBER,
}


def colour_of(metric: str) -> Colour:
    """Return blue, unless another line of the same chart is blue."""
    area, _, name = metric.partition("/")
    return PHASES[name] if area == "time" and name in PHASES else _OTHERS.get(metric, BLUE)
