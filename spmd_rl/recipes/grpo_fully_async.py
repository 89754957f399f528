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
from spmd_rl.config.combinations import refuse
from spmd_rl.mesh.split import SeparateSplit
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check
from spmd_rl.rollout.sampler_config import UNPAUSED_REFUSED

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    behaviour: Literal["old", "rollout"] = "rollout"
    split: SeparateSplit = field(default_factory=SeparateSplit)
    sampler: rl.SamplerConfig = field(default_factory=lambda: rl.SamplerConfig(max_lag=2))
    phases: ClassVar[rl.Phases] = rl.CONCURRENT  # nothing sleeps: both roles work at once
    is_on_policy: ClassVar[bool] = False
    first_settings: ClassVar[tuple[str, ...]] = ("sampler.max_lag", "sampler.max_running")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(UNPAUSED_REFUSED, self)


def main(ctl: rl.Controller, cfg: Config) -> None:
    run = rl.PolicyRun(ctl, cfg)
    sampler = run.sampler()
    for step in run.steps(sampler=sampler):
        with ctl.phase("sync"):
            run.weights.push(version=step.index, drain=False)
            sampler.set_version(step.index)
        run.evaluation.after(step.index)
        with ctl.phase("rollout"):
            groups = sampler.take(step.index)
        if sampler.shortage:
            step.end_run(sampler.shortage)
            continue
        with ctl.phase("train"):
            stats = run.update.step(groups, step.index)
        step.log(groups, sampler.failed_groups(), stats, sampler.metrics(), run.engine_metrics())
    run.finish(drain=False)
