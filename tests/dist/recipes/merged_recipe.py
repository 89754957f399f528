"""Recipe of a test: what an engine has after a merged push, in a file for each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

import spmd_rl as rl
from spmd_rl.controller.endpoint import collective
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True)
class Config(grpo.Config):
    """The settings of GRPO."""


class SavingRollout(rl.Rollout):
    """An engine that writes its weights to files."""

    @collective
    def save_weights(self, folder: str) -> None:
        """Write the weights of this rank's engine."""
        named = {name: one.detach().clone() for name, one in self.engine.model.named_parameters()}
        save_file(named, Path(folder) / f"engine-{self.context.rank}.safetensors")


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    rollout = ctl.spawn(SavingRollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    ctl.link(trainer, rollout).push(version=0)
    rollout.save_weights.call(str(ctl.run_folder))
