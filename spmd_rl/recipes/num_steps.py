"""Steps of a run: how many, from passes over the data if need be, and which is the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from dataclasses import fields
from typing import Protocol

from spmd_rl.algo.config import PolicyConfig
from spmd_rl.config.combinations import refuse
from spmd_rl.config.rules import at_least, require
from spmd_rl.errors import ConfigError
from spmd_rl.plan.combinations import EPOCHS_REFUSED, START_REFUSED
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.recipes.configs import TrainingRecipe
from spmd_rl.train.config import TrainerConfig, learning_rate
from spmd_rl.train.training_role import TrainingRole


class Skippable(Protocol):
    """A stream of data that can go on as after some draws."""

    def skip(self, num: int, /) -> None: ...


def check_steps(cfg: TrainingRecipe) -> None:
    """Raise a ConfigError for epochs that cannot be, or that stand beside steps, for a start step
    behind the last, and for steps whose learning rate would be 0.
    """
    fits = 0 <= cfg.epochs < math.inf
    require(fits, "epochs", cfg.epochs, "0 (steps counts) or more, and finite")
    at_least(cfg, {"start_step": 0})
    (default,) = (field.default for field in fields(cfg) if field.name == "steps")
    is_changed = {"steps": cfg.steps if cfg.steps != default else 0}
    refuse(EPOCHS_REFUSED, {"epochs": cfg.epochs} | is_changed)
    refuse(START_REFUSED, cfg)
    if not cfg.epochs:
        check_schedule(cfg, cfg.steps)


def check_schedule(cfg: TrainingRecipe, num_steps: int) -> None:
    """Raise a ConfigError where the schedule of a trainer's rate ends before its last train step.

    The trainer, and the critic if the algorithm has one, take `num_steps` train steps, or fewer.
    """
    for key, trainer, needed in _optimizer_steps(cfg, num_steps):
        if trainer.schedule != "constant" and needed > trainer.total_steps:
            raise ConfigError(
                f"{key}.total_steps = {trainer.total_steps}: a run of {num_steps} steps with "
                f"{key}.minibatches = {trainer.minibatches} takes {needed} optimizer steps, and "
                f"the learning rate of the last {needed - trainer.total_steps} would be 0: set it "
                f"to {needed}"
            )


def _optimizer_steps(
    cfg: TrainingRecipe, num_steps: int
) -> Iterator[tuple[str, TrainerConfig, int]]:
    """Yield key and settings of each trainer that learns, and its optimizer steps in the run."""
    critic, alone = None, 0
    if isinstance(cfg, PolicyConfig) and cfg.algorithm == "ppo":
        critic, alone = RunNeeds.of(cfg).critic, cfg.critic_warmup_steps - cfg.start_step
    yield "trainer", cfg.trainer, max(0, num_steps - max(0, alone)) * cfg.trainer.minibatches
    if critic is not None:
        yield "critic", critic, num_steps * critic.minibatches


def rate_warnings(cfg: TrainingRecipe, num_steps: int) -> list[str]:
    """Return a sentence for each trainer whose rate is 0, or is still rising at the run's end.

    `cfg` and `num_steps` are as in `check_schedule`.
    """
    sentences = []
    for key, trainer, needed in _optimizer_steps(cfg, num_steps):
        if not trainer.lr:
            sentences.append(f"{key}.lr = 0: nothing is learned")
        elif 0 < needed < trainer.warmup_steps:
            sentences.append(
                f"{key}.warmup_steps = {trainer.warmup_steps} is more than the {needed} optimizer "
                f"steps of this run: its learning rate ends at "
                f"{learning_rate(trainer, needed - 1):g}, not at {key}.lr = {trainer.lr:g}"
            )
    return sentences


def num_steps(cfg: TrainingRecipe, data: Sized | int, per_step: int, *, before: int = 0) -> int:
    """Return how many steps a run takes, and print what its learning rate leaves undone.

    `data` is one pass over the data, or its size, and a step takes `per_step` of it. A last step
    that epochs fill in part is whole. `before` counts the train steps that the recipe takes ahead
    of these.
    Raises: ConfigError, as `check_schedule` does.
    """
    steps = cfg.steps
    if cfg.epochs:
        size = data if isinstance(data, int) else len(data)
        # a share such as 0.1 is no binary fraction: a step more than it says must not come of that
        wanted = round(cfg.epochs * size / per_step, 9)
        steps = max(1, math.ceil(wanted))
        check_schedule(cfg, steps + before)
    for sentence in rate_warnings(cfg, steps + before):
        print(sentence, flush=True)
    return steps


def first_step(
    cfg: TrainingRecipe,
    resumed: int,
    trainers: Sequence[TrainingRole],
    data: Skippable,
    per_step: int,
) -> int:
    """Return the step to begin with: where a checkpoint left off, or else `cfg.start_step`.

    In a new run that begins later than at step 0, the data of the steps before is skipped,
    `per_step` of it for each. The schedules of the trainers' learning rates are as after these
    steps. `resumed` is what `ctl.resume` returned.
    """
    if resumed or not cfg.start_step:
        return resumed
    data.skip(cfg.start_step * per_step)
    for trainer in trainers:
        trainer.begin_after.call(cfg.start_step)
    return cfg.start_step
