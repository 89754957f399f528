"""Steps of a run: how many, from passes over the data if need be, and which is the first."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import fields
from typing import Any, Protocol

from spmd_rl.config.rules import at_least, require
from spmd_rl.train.training_role import TrainingRole


class Skippable(Protocol):
    """A stream of data that can go on as after some draws."""

    def skip(self, num: int, /) -> None: ...


def check_steps(cfg: Any) -> None:
    """Raise a ConfigError for epochs that cannot be, or that stand beside steps, and for a start
    step behind the last.

    `cfg` is a recipe's config with `epochs`, `steps` and `start_step`.
    """
    fits = 0 <= cfg.epochs < math.inf
    require(fits, "epochs", cfg.epochs, "0 (steps counts) or more, and finite")
    (default,) = (field.default for field in fields(cfg) if field.name == "steps")
    is_one = not cfg.epochs or cfg.steps == default
    require(is_one, "epochs", cfg.epochs, f"0 beside steps = {cfg.steps}: give one of the two")
    at_least(cfg, {"start_step": 0})
    fits = cfg.epochs > 0 or cfg.start_step < max(cfg.steps, 1)
    require(fits, "start_step", cfg.start_step, f"less than steps = {cfg.steps}")


def num_steps(cfg: Any, data: Sized | int, per_step: int | None = None) -> int:
    """Return how many steps a run takes. `data` is one pass over the data, or its size.

    A step takes `per_step` of the data, or else `cfg.prompts_per_step`. A last step that epochs
    fill in part is whole.
    """
    if not cfg.epochs:
        return int(cfg.steps)
    size = data if isinstance(data, int) else len(data)
    # a share such as 0.1 is no binary fraction: a step more than it says must not come of that
    return max(1, math.ceil(round(cfg.epochs * size / (per_step or cfg.prompts_per_step), 9)))


def first_step(
    cfg: Any,
    resumed: int,
    trainers: Sequence[TrainingRole],
    data: Skippable,
    per_step: int | None = None,
) -> int:
    """Return the step to begin with: where a checkpoint left off, or else `cfg.start_step`.

    In a new run that begins later than at step 0, the data of the steps before is skipped, and the
    schedules of the trainers' learning rates are as after these steps. `resumed` is what
    `ctl.resume` returned.
    """
    if resumed or not cfg.start_step:
        return resumed
    data.skip(cfg.start_step * (per_step or cfg.prompts_per_step))
    for trainer in trainers:
        trainer.begin_after.call(cfg.start_step)
    return int(cfg.start_step)
