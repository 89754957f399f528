"""GRPO, synchronous and on-policy: gradients are taken at the very weights that drew the samples.

spmd-rl run grpo --model PATH --data train.jsonl --reward module:function

`--algorithm=NAME` chooses another algorithm that learns from the rewards of samples. Where it
leaves groups out, or `sampler` is set, a sampler replaces the groups that are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import spmd_rl as rl


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
    engine: rl.NativeEngineConfig | rl.SglangEngineConfig = field(
        default_factory=rl.NativeEngineConfig
    )
    hooks: rl.HookConfig = field(default_factory=rl.HookConfig)
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
        rl.refuse_greedy(self.sampling)
        if self.is_on_policy:
            rl.refuse_lag(self.sampler)
        rl.algorithm_of(self, self.sampling)

    def extra_roles(self) -> list[rl.ExtraRole]:
        """Return what the algorithm needs besides a trainer and an engine, for the plan."""
        return rl.extra_roles_of(self)


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
    if cfg.kl.reference:
        rl.check_inputs(model=cfg.kl.reference, data=cfg.data, trainer=rl.TrainerConfig())
    rl.check_engine(cfg.engine, cfg.run, cfg.trainer)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles, keep_group=cfg.hooks.keep_group)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.load_prompts(cfg)
    num_steps = rl.num_steps(cfg, prompts)
    rl.announce_correction(cfg.engine, cfg.correction_in_words, cfg.trainer)
    sampler = make_sampler(cfg, rollout, prompts, update)
    evaluation = rl.Evaluation(ctl, cfg, rollout, num_steps)
    source = {"sampler": sampler} if sampler else {"prompts": prompts}
    start = ctl.resume(trainer=trainer, **source, **update.savers)
    start = rl.first_step(cfg, start, update.trainers, prompts)

    for step in ctl.steps(num_steps, start):
        with ctl.phase("sync"):
            weights.push(version=step.index)
        evaluation.after(step.index)
        with ctl.phase("rollout"):
            groups = generated(cfg, rollout, prompts, sampler, step.index)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, stats)
        if sampler:
            step.log(sampler.failed_groups(), sampler.metrics())
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end(trainer, weights)


def generated(
    cfg: Config,
    rollout: rl.Rollout,
    prompts: rl.Prompts,
    sampler: rl.GroupSampler | None,
    index: int,
) -> list[rl.Group]:
    """Return the groups of step `index`, whose weights are of that version."""
    if sampler is None:
        asked = prompts.take(cfg.prompts_per_step)
        return rollout.generate.call(asked, cfg.sampling, step=index)
    sampler.set_version(index)
    return sampler.take(index)


def make_sampler(
    cfg: Config, rollout: rl.Rollout, prompts: rl.Prompts, update: rl.PolicyUpdate
) -> rl.GroupSampler | None:
    """Return what replaces rejected groups, if any can be rejected or the settings ask for it."""
    if not update.may_drop_groups and cfg.sampler == rl.SamplerConfig():
        return None
    return rl.GroupSampler(
        rollout,
        prompts,
        cfg.sampling,
        cfg.sampler,
        groups_per_step=cfg.prompts_per_step,
        keep=update.keep,
    )
