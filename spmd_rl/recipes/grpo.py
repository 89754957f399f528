"""GRPO, synchronous and on-policy: gradients are taken at the very weights that drew the samples.

spmd-rl run grpo --model PATH --data train.jsonl --reward module:function

`--algorithm=NAME` chooses another algorithm that learns from the rewards of samples. Where it
leaves groups out, or `sampler` is set, a sampler replaces the groups that are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import spmd_rl as rl
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.make import make_algorithm
from spmd_rl.environments.config import AgentConfig, agree_with_agent
from spmd_rl.environments.make import check_agent
from spmd_rl.recipes.policy_update import check_adapters, check_coded_weights, extra_roles_of
from spmd_rl.rollout.engine import refuse_greedy
from spmd_rl.rollout.sampler_config import refuse_lag


@dataclass(frozen=True)
class Config(rl.PolicyConfig):
    model: str  # Hugging Face folder
    # prompts: a file, or a table of files and weights (docs/data.md); a slice as path@[a:b]
    data: str | dict[str, float]
    # module:function or path/to/file.py:function; several as a table of names and weights
    reward: str | dict[str, float] = "spmd_rl.rewards.answers.match:exact"
    steps: int = 200  # training steps of the whole run
    epochs: float = 0.0  # passes over the data, instead of steps; 0: steps counts
    start_step: int = 0  # steps that a new run counts as done, with their data (docs/resume.md)
    prompts_per_step: int = 32  # each with sampling.num_samples samples
    eval: rl.EvalConfig = field(default_factory=rl.EvalConfig)
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.PolicySplit = field(default_factory=rl.PolicySplit)
    prompts: rl.PromptConfig = field(default_factory=rl.PromptConfig)
    sampling: rl.SamplingConfig = field(default_factory=lambda: rl.SamplingConfig(num_samples=8))
    engine: rl.EngineConfig = field(default_factory=rl.NativeEngineConfig)
    hooks: rl.HookConfig = field(default_factory=rl.HookConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    graders: rl.GraderConfig = field(default_factory=rl.GraderConfig)
    sampler: rl.SamplerConfig = field(default_factory=rl.SamplerConfig)
    trainer: rl.TrainerConfig = field(default_factory=rl.TrainerConfig)
    # a model that only algorithm = "ppo" trains
    critic: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(lr=1e-5))
    offload: rl.OffloadConfig = field(default_factory=rl.OffloadConfig)
    phases: ClassVar[rl.Phases] = rl.COLOCATED
    is_on_policy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.at_least(self, {"steps": 0, "prompts_per_step": 1})
        rl.check_steps(self)
        refuse_greedy(self.sampling)
        agree_with_agent(self)
        if self.is_on_policy:
            refuse_lag(self.sampler)
            refuse_uncorrected_rounds(self)
        check_adapters(self)
        check_coded_weights(self)
        _ = self.made_algorithm  # refuses settings that do not fit

    @cached_property
    def made_algorithm(self) -> Algorithm:
        """The algorithm with its settings."""
        return make_algorithm(
            self,
            num_samples=self.sampling.num_samples,
            max_response_tokens=self.sampling.max_tokens,
        )

    def extra_roles(self) -> list[rl.ExtraRole]:
        """Return what the algorithm needs besides a trainer and an engine, for the plan."""
        return extra_roles_of(self)


def refuse_uncorrected_rounds(cfg: Config) -> None:
    """Raise a ConfigError where tokens go on under newer weights as if these had drawn all."""
    if cfg.sampler.round_tokens and cfg.behaviour == "old" and not cfg.correction.corrects:
        raise rl.ConfigError(
            'sampler.round_tokens with behaviour = "old": tokens of earlier steps would pass for '
            'those of the present weights; set behaviour = "rollout", or a correction.mode'
        )


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_inputs(
        model=cfg.model,
        data=cfg.data,
        reward=cfg.reward,
        hooks=cfg.hooks,
        graders=cfg.graders,
        prompts=cfg.prompts,
        trainer=cfg.trainer,
        sampling=cfg.sampling,
    )
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
