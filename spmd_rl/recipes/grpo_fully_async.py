"""GRPO, fully asynchronous: engines generate without a pause, and weights are pushed beneath them.

spmd-rl run grpo_fully_async --model PATH --data train.jsonl --reward module:function --nproc 2

Version v of the weights is pushed after train step v. Answers that are half finished then go on
under the new weights, and every token keeps its version. No token is more than `sampler.max_lag`
versions older than the weights that learn from it. The engine needs ranks of its own.

An evaluation begins right after a push, and the next push waits for it: all its tokens are of that
version. The engines generate for training beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import spmd_rl as rl
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    behaviour: Literal["old", "rollout"] = "rollout"
    split: rl.SeparateSplit = field(default_factory=rl.SeparateSplit)
    sampler: rl.SamplerConfig = field(default_factory=lambda: rl.SamplerConfig(max_lag=2))
    phases: ClassVar[rl.Phases] = rl.CONCURRENT  # nothing sleeps: both roles work at once
    is_on_policy: ClassVar[bool] = False
    first_settings: ClassVar[tuple[str, ...]] = ("sampler.max_lag", "sampler.max_running")


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles, keep_group=cfg.hooks.keep_group)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.load_prompts(cfg)
    num_steps = rl.num_steps(cfg, prompts)
    rl.announce_correction(cfg.engine, cfg.correction_in_words, cfg.trainer)
    evaluation = rl.Evaluation(ctl, cfg, rollout, num_steps)
    sampler = rl.GroupSampler(
        rollout,
        prompts,
        cfg.sampling,
        cfg.sampler,
        groups_per_step=cfg.prompts_per_step,
        keep=update.keep,
    )
    start = ctl.resume(trainer=trainer, sampler=sampler, **update.savers)
    start = rl.first_step(cfg, start, update.trainers, prompts)

    for step in ctl.steps(num_steps, start):
        with ctl.phase("sync"):
            weights.push(version=step.index, drain=False)
            sampler.set_version(step.index)
        evaluation.after(step.index)
        with ctl.phase("rollout"):
            groups = sampler.take(step.index)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, sampler.failed_groups(), stats, sampler.metrics())
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end(trainer, weights, drain=False)
