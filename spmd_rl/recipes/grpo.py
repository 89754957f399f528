"""GRPO, synchronous and on-policy: gradients are taken at the very weights that drew the samples.

spmd-rl run grpo --model PATH --data train.jsonl --reward module:function

`--algorithm=NAME` chooses another algorithm that learns from the rewards of samples. Where it
leaves groups out, or `sampler` is set, a sampler replaces the groups that are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import spmd_rl as rl
from spmd_rl.config.combinations import refuse
from spmd_rl.environments.config import agree_with_agent
from spmd_rl.environments.make import check_agent
from spmd_rl.recipes import configs
from spmd_rl.recipes.policy_update import check_pushes, extra_roles_of
from spmd_rl.rollout.engine import refuse_greedy
from spmd_rl.rollout.sampler_config import ON_POLICY_REFUSED


@dataclass(frozen=True)
class Config(configs.PolicyRecipe):
    phases: ClassVar[rl.Phases] = rl.COLOCATED
    is_on_policy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.at_least(self, {"steps": 0, "prompts_per_step": 1})
        rl.check_steps(self)
        refuse_greedy(self.sampling)
        agree_with_agent(self)
        if self.is_on_policy:
            refuse(ON_POLICY_REFUSED, self)
        check_pushes(self)
        _ = self.made_algorithm  # refuses settings that do not fit

    def extra_roles(self) -> list[rl.ExtraRole]:
        """Return what the algorithm needs besides a trainer and an engine, for the plan."""
        return extra_roles_of(self)


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_data_recipe(cfg, cfg.trainer)
    rl.check_evaluation(cfg)
    check_agent(cfg.agent)
    if cfg.kl.reference:
        rl.check_inputs(model=cfg.kl.reference, data=cfg.data, trainer=rl.TrainerConfig())
    rl.check_engine(cfg.engine, cfg.run, cfg.trainer)


def main(ctl: rl.Controller, cfg: Config) -> None:
    run = rl.PolicyRun(ctl, cfg)
    sampler = run.sampler() if replaces_groups(cfg, run.update) else None
    for step in run.steps(**{"sampler": sampler} if sampler else {}):
        with ctl.phase("sync"):
            run.weights.push(version=step.index)
        run.evaluation.after(step.index)
        with ctl.phase("rollout"):
            if sampler:
                sampler.set_version(step.index)
                groups = sampler.take(step.index)
            else:
                asked = run.prompts.take(cfg.prompts_per_step)
                groups = run.rollout.generate.call(asked, cfg.sampling, step=step.index)
        if sampler and sampler.shortage:
            step.end_run(sampler.shortage)
            continue
        with ctl.phase("train"):
            stats = run.update.step(groups, step.index)
        step.log(groups, stats, run.engine_metrics())
        if sampler:
            step.log(sampler.failed_groups(), sampler.metrics())
    run.finish()


def replaces_groups(cfg: Config, update: rl.PolicyUpdate) -> bool:
    """Return whether a sampler replaces groups that can be rejected, or that settings ask for."""
    return update.may_drop_groups or cfg.sampler != rl.SamplerConfig()
