"""GRPO one step ahead: while the trainer learns from step k, the engine generates for step k + 1.

It is for disjoint meshes (`--split.train.ranks=1 --split.infer.ranks=1`): roles that share ranks
alternate anyhow. Samples are one version old, so the ratio is taken against the engine's log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import spmd_rl as rl
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True)
class Config(grpo.Config):
    engine_sleeps: ClassVar[bool] = False  # its pages stay while the trainer beside it trains

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tis_cap:
            raise rl.ConfigError(
                "tis_cap = 0 is all that this recipe can do: its ratio is taken "
                "against the engine's log-probs already"
            )


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    rollout = ctl.spawn(
        rl.Rollout,
        cfg.engine,
        on=roles.infer,
        model=cfg.model,
        reward=cfg.reward,
        seed=cfg.run.seed,
    )
    weights = ctl.link(trainer, rollout)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model), cfg.sampling)
    loss = partial(
        rl.grpo_loss, clip_low=cfg.clip_low, clip_high=cfg.clip_high, behaviour="rollout"
    )
    rl.announce_correction(cfg.engine, "the ratio is taken against the engine's log-probs")
    ahead = rl.CallQueue(rollout.generate)

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, prompts=prompts, ahead=ahead)):
        if not ahead:  # the first step of a run
            weights.push(version=step.index)
            ahead.start(prompts.next(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("rollout"):
            groups = ahead.wait()
        with ctl.phase("sync"):
            weights.push(version=step.index)
        ahead.start(prompts.next(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            stats = trainer.train_step.call(rl.pack(groups, rl.group_advantage(groups)), loss)
        step.log(groups, stats)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
