"""Number of train steps of a run: as given, or from passes over the data; evaluations of it."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import fields
from typing import Any

from spmd_rl.config.rules import require


def check_epochs(cfg: Any) -> None:
    """Raise a ConfigError for epochs that cannot be, or that stand beside steps.

    `cfg` is a recipe's config with `epochs` and `steps`.
    """
    fits = 0 <= cfg.epochs < math.inf
    require(fits, "epochs", cfg.epochs, "0 (steps counts) or more, and finite")
    (default,) = (field.default for field in fields(cfg) if field.name == "steps")
    is_one = not cfg.epochs or cfg.steps == default
    require(is_one, "epochs", cfg.epochs, f"0 beside steps = {cfg.steps}: give one of the two")


def num_steps(cfg: Any, data: Sized, per_step: int = 0) -> int:
    """Return how many steps a run takes, where `data` is one pass over the data.

    `per_step` is how much of it a step takes; 0: `cfg.prompts_per_step`. A last step that epochs
    fill in part is whole.
    """
    if not cfg.epochs:
        return int(cfg.steps)
    # a share such as 0.1 is no binary fraction: a step more than it says must not come of that
    return max(1, math.ceil(round(cfg.epochs * len(data) / (per_step or cfg.prompts_per_step), 9)))


def is_eval_due(index: int, every: int, num_steps: int) -> bool:
    """Return whether an evaluation follows step `index`: every so many steps, and the last one."""
    return (index + 1) % every == 0 or index + 1 == num_steps
