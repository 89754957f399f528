"""On-policy distillation: a student learns from a teacher's log-probs of the student's samples.

spmd-rl run distill --model STUDENT --teacher TEACHER --data prompts.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import spmd_rl as rl
from spmd_rl.algo.distill import (
    distill_credit,
    distill_gains,
    distill_metrics,
    topk_kl_loss,
    with_candidates,
)
from spmd_rl.algo.sample_rewards import pack_samples, with_rewards
from spmd_rl.check.engine import announce_correction
from spmd_rl.recipes import configs
from spmd_rl.rollout.engine import refuse_greedy, refuse_replay


@dataclass(frozen=True, kw_only=True)
class Config(configs.TrainingRecipe, configs.DataRecipe):
    model: str  # Hugging Face folder of the student
    teacher: str  # Hugging Face folder of a model with the same tokenizer
    # sampled: the teacher judges the tokens drawn; topk: the student learns its likeliest tokens
    form: Literal["sampled", "topk"] = "sampled"
    coef: float = 1.0  # weight of the divergence
    top_k: int = 64  # how many of the teacher's likeliest tokens topk compares
    # topk: forward covers all that the teacher may say; reverse keeps to what it finds likely
    direction: Literal["forward", "reverse"] = "reverse"
    # sampled clips the ratio of probabilities below 1 - clip_low
    clip_low: float = 0.2
    clip_high: float = 0.2  # and above 1 + clip_high
    # a set without a reward is graded by how much likelier the teacher finds the samples
    eval: rl.EvalConfig = field(default_factory=rl.EvalConfig)
    split: rl.Split = field(default_factory=rl.Split)
    prompts: rl.PromptConfig = field(default_factory=lambda: rl.PromptConfig(answer_key=""))
    sampling: rl.SamplingConfig = field(default_factory=lambda: rl.SamplingConfig(num_samples=4))
    graders: rl.GraderConfig = field(default_factory=rl.GraderConfig)  # of evaluations
    reward: str = field(default="", init=False)  # no setting: the teacher grades samples
    frozen: rl.FrozenConfig = field(default_factory=rl.FrozenConfig)  # of the teacher
    offload: rl.OffloadConfig = field(default_factory=rl.OffloadConfig)
    phases: ClassVar[rl.Phases] = rl.COLOCATED.with_roles(train={"teacher": rl.ALL})

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "prompts_per_step": 1, "coef": 0, "top_k": 1})
        rl.at_least(self, {"clip_low": 0, "clip_high": 0})
        rl.check_steps(self)
        refuse_greedy(self.sampling)
        if self.hooks.keep_group:
            raise rl.ConfigError("hooks.keep_group must be empty: distill learns from all samples")
        if self.form == "topk":
            refuse_replay(self.sampling)

    def extra_roles(self) -> list[rl.ExtraRole]:
        """Return the teacher, for the plan."""
        return [rl.ExtraRole("teacher", self.frozen, self.teacher)]


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_data_recipe(cfg, cfg.trainer, teacher=cfg.teacher)
    rl.check_evaluation(cfg)
    rl.check_engine(cfg.engine, cfg.run, cfg.trainer)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    teacher = ctl.spawn(
        rl.FrozenModel, cfg.frozen, on=roles.train, model=cfg.teacher, name="teacher"
    )
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.load_prompts(cfg)
    announce_correction(cfg.engine, "none", cfg.trainer)
    num_steps = rl.num_steps(cfg, prompts, cfg.prompts_per_step)
    evaluation = rl.Evaluation(
        ctl, cfg, rollout, num_steps, partial(graded, teacher), first=cfg.start_step
    )
    start = ctl.resume(trainer=trainer, prompts=prompts)
    start = rl.first_step(cfg, start, [trainer], prompts, cfg.prompts_per_step)

    for step in ctl.steps(num_steps, start):
        with ctl.phase("sync"):
            weights.push(version=step.index)
        evaluation.after(step.index)
        with ctl.phase("rollout"):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            batch = taught(cfg, teacher, pack_samples(groups))
            stats = learned(cfg, trainer, batch)
        # the reward of a sample is how much likelier the teacher finds it, per token
        groups = with_rewards(groups, distill_gains(batch))
        step.log(groups, stats, distill_metrics(batch))
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end(trainer, weights)


def learned(cfg: Config, trainer: rl.Trainer, batch: rl.Batch) -> dict[str, float]:
    """Learn from a batch with the loss of either form, and return the metrics."""
    if cfg.form == "sampled":
        loss = partial(rl.grpo_loss, clip_low=cfg.clip_low, clip_high=cfg.clip_high)
        return trainer.train_step.call(batch, loss)
    topk_loss = partial(topk_kl_loss, direction=cfg.direction, coef=cfg.coef)
    return trainer.train_step.call(batch, topk_loss, needs=rl.Needs(candidates=True))


def taught(cfg: Config, teacher: rl.FrozenModel, batch: rl.Batch) -> rl.Batch:
    """Return the batch with the teacher's log-probs, and with what the loss reads of them."""
    batch = batch.with_columns(teacher_logprobs=teacher.score.call(batch))
    if cfg.form == "sampled":
        return distill_credit(batch, coef=cfg.coef)
    top = teacher.top_logprobs.call(batch, cfg.top_k)
    return with_candidates(batch, top.ids, top.logprobs)


def graded(teacher: rl.FrozenModel, groups: list[rl.Group]) -> list[rl.Group]:
    """Return the groups with a reward of each sample: how much likelier the teacher finds it."""
    batch = pack_samples(groups)
    batch = batch.with_columns(teacher_logprobs=teacher.score.call(batch))
    return with_rewards(groups, distill_gains(batch))
