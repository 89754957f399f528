"""GRPO one step ahead: while the trainer learns from step k, the engine generates for step k + 1.

It is for disjoint meshes (`--split.train.ranks=1 --split.infer.ranks=1`): roles that share ranks
alternate anyhow. Samples are one version old, so the ratio is taken against the engine's log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import spmd_rl as rl
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    behaviour: Literal["old", "rollout"] = "rollout"
    phases: ClassVar[rl.Phases] = rl.CONCURRENT  # nothing sleeps: both roles work at once
    is_on_policy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.refuse_sampler(self.sampler, self.hooks)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.load_prompts(cfg)
    num_steps = rl.num_steps(cfg, prompts)
    rl.announce_correction(cfg.engine, cfg.correction_in_words, cfg.trainer)
    evaluation = rl.Evaluation(ctl, cfg, rollout, num_steps)
    ahead = rl.CallQueue(rollout.generate)
    start = ctl.resume(trainer=trainer, prompts=prompts, ahead=ahead, **update.savers)
    start = rl.first_step(cfg, start, update.trainers, prompts)

    for step in ctl.steps(num_steps, start):
        if not ahead:  # the first step of a run
            weights.push(version=step.index)
            evaluation.after(step.index)
            ahead.start(prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("rollout"):
            groups = ahead.wait()
        with ctl.phase("sync"):
            weights.push(version=step.index)
        evaluation.after(step.index)
        ahead.start(prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, stats)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end(trainer, weights)
