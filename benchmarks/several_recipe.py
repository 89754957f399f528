"""The recipe `grpo` without checkpoints and export, for several_gpus.py.

    spmd-rl run benchmarks.several_recipe --model FOLDER --data FILE \\
        --reward benchmarks.proof_recipe:even
"""

from __future__ import annotations

import spmd_rl as rl
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    for step in ctl.steps(cfg.steps):
        with ctl.phase("sync"):
            weights.push(version=step.index)
        with ctl.phase("rollout"):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, stats)
