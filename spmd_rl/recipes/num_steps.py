"""Number of train steps of a run: as given, or from passes over the data."""

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


def num_steps(cfg: Any, prompts: Sized) -> int:
    """Return how many steps a run takes, where `prompts` is one pass over the data.

    A last step that epochs fill in part is whole.
    """
    if not cfg.epochs:
        return int(cfg.steps)
    # a share such as 0.1 is no binary fraction: a step more than it says must not come of that
    return max(1, math.ceil(round(cfg.epochs * len(prompts) / cfg.prompts_per_step, 9)))
