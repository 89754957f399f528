"""Replay: training from the samples that a run has recorded. Nothing is generated.

spmd-rl run replay --config runs/grpo/config.toml --recorded runs/grpo --run.name replay

With the settings, the splits and the model of the recorded run, every train step is that of the
recorded one, bit for bit. With others, it shows what they would have learned from the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import spmd_rl as rl
from spmd_rl.check.inputs import check_model
from spmd_rl.recipes import grpo

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    # settings of data, reward, eval, prompts, engine, hooks and sampler are accepted, and not used
    recorded: str  # folder of a run: of grpo, grpo_async, grpo_fully_async or collect
    data: str | dict[str, float] = ""
    epochs: float = 0.0  # must be 0: a replay counts in steps
    start_step: int = 0  # must be 0: a replay begins with the first recorded step
    sampler: rl.SamplerConfig = field(default_factory=rl.SamplerConfig)
    phases: ClassVar[rl.Phases] = rl.CONCURRENT  # nothing sleeps: there is no engine
    is_on_policy: ClassVar[bool] = False
    # they are accepted, and not used
    seldom_settings: ClassVar[tuple[str, ...]] = (
        *("data", "epochs", "reward", "eval", "prompts", "sampling", "engine", "hooks"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs:
            raise rl.ConfigError("epochs must be 0: a replay counts in steps")
        if self.start_step:
            raise rl.ConfigError("start_step must be 0: a replay begins with the first step")


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    check_model(cfg.model, trainer=cfg.trainer)
    if cfg.steps:
        rl.read_groups(cfg.recorded, cfg.steps)  # the last that is needed


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, **update.savers)):
        groups = rl.read_groups(cfg.recorded, step.index + 1)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, stats)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
