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
    run = rl.PolicyRun(ctl, cfg, replaces_groups=False)
    ahead = rl.CallQueue(run.rollout.generate)
    for step in run.steps(prompts=run.prompts, ahead=ahead):
        if not ahead:  # the first step of a run
            run.weights.push(version=step.index)
            run.evaluation.after(step.index)
            ahead.start(run.prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("rollout"):
            groups = ahead.wait()
        with ctl.phase("sync"):
            run.weights.push(version=step.index)
        run.evaluation.after(step.index)
        ahead.start(run.prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            stats = run.update.step(groups, step.index)
        step.log(groups, stats, run.engine_metrics())
    run.finish()
