"""RLHF: GRPO, or another algorithm, with rewards from a trained reward model.

spmd-rl run rlhf --model PATH --reward_model runs/reward_model/hf --data prompts.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import spmd_rl as rl
from spmd_rl.algo.sample_rewards import pack_samples, with_rewards
from spmd_rl.config.combinations import refuse
from spmd_rl.data.render.answer_end import AnswerEnd
from spmd_rl.environments.make import check_agent
from spmd_rl.evaluation.config import eval_rewards
from spmd_rl.model.tokenizer import has_tokenizer
from spmd_rl.plan.combinations import REWARD_MODEL_REFUSED
from spmd_rl.recipes import grpo


@dataclass(frozen=True)
class Config(grpo.Config):
    reward: str = ""  # rewards come from reward_model
    reward_model: str = ""  # Hugging Face folder from `spmd-rl run reward_model`
    prompts: rl.PromptConfig = field(default_factory=lambda: rl.PromptConfig(answer_key=""))
    frozen: rl.FrozenConfig = field(default_factory=rl.FrozenConfig)  # of the reward model
    phases: ClassVar[rl.Phases] = rl.COLOCATED.with_roles(
        train={"reward_model": rl.ALL},
        # samples of an evaluation; the engine keeps its weights, as no push comes before the rest
        grade={"infer": ("weights",), "reward_model": rl.ALL},
    )

    seldom_settings: ClassVar[tuple[str, ...]] = ("reward",)  # it must be empty

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.refuse_sampler(self.sampler, self.hooks)
        refuse(
            REWARD_MODEL_REFUSED, {"reward": self.reward, "eval.reward": eval_rewards(self.eval)}
        )

    def extra_roles(self) -> list[rl.ExtraRole]:
        """Return the reward model, and what the algorithm needs, for the plan."""
        return [
            rl.ExtraRole("reward_model", self.frozen, self.reward_model),
            *super().extra_roles(),
        ]


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    if not cfg.reward_model:
        raise rl.ConfigError("--reward_model is missing: name a Hugging Face folder")
    rl.check_data_recipe(cfg, cfg.trainer, reward_model=cfg.reward_model)
    rl.check_evaluation(cfg)
    check_agent(cfg.agent)
    rl.check_engine(cfg.engine, cfg.run, cfg.trainer)


def main(ctl: rl.Controller, cfg: Config) -> None:
    ranks = ctl.world.split(cfg.split).train
    judge = ctl.spawn(
        rl.FrozenModel, cfg.frozen, on=ranks, model=cfg.reward_model, name="reward_model"
    )
    grade = partial(graded, judge, answer_end(cfg))
    run = rl.PolicyRun(ctl, cfg, grade)
    for step in run.steps():
        with ctl.phase("sync"):
            run.weights.push(version=step.index)
        run.evaluation.after(step.index)
        with ctl.phase("rollout"):
            groups = run.rollout.generate.call(run.prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            groups = grade(groups)
            stats = run.update.step(groups, step.index)
        step.log(groups, stats, run.engine_metrics())
    run.finish()


def answer_end(cfg: Config) -> AnswerEnd | None:
    """Return how the reward model's chat template ends an answer; None without templates.

    A reward model's folder without a tokenizer has the policy's.
    """
    if not cfg.prompts.chat_template:
        return None
    policy = rl.load_tokenizer(cfg.model)
    judge = rl.load_tokenizer(cfg.reward_model) if has_tokenizer(cfg.reward_model) else policy
    return AnswerEnd.of(judge, policy)


def graded(judge: rl.FrozenModel, end: AnswerEnd | None, groups: list[rl.Group]) -> list[rl.Group]:
    """Return the groups with the rewards that the reward model gives their samples.

    It is read where its chat template ends an answer.
    """
    scores = judge.rewards.call(pack_samples(end.after(groups) if end else groups))
    return with_rewards(groups, scores.values)
