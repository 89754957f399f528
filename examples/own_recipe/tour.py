"""A recipe with every extension that docs/recipes.md shows.

spmd-rl run examples/own_recipe/tour.py --model PATH --data easy.jsonl --hard hard.jsonl \
    --held_out eval.jsonl --reward examples/own_recipe/tour.py:reward
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

import spmd_rl as rl
from spmd_rl.algo.losses import LossInput
from spmd_rl.recipes import grpo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Config(grpo.Config):
    hard: str = ""  # prompts that replace those of data, step by step
    held_out: str = ""  # prompts of the evaluation
    eval_every: int = 10  # steps between evaluations
    cap: float = 5.0  # largest weight of a token in the loss
    distance_cost: float = 0.01  # penalty for each nat of distance from the first weights
    phases: ClassVar[rl.Phases] = rl.COLOCATED.with_roles(train={"ref": rl.ALL})

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.refuse_sampler(self.sampler, self.hooks)
        if self.epochs or self.start_step:
            raise rl.ConfigError("this recipe counts steps: leave epochs and start_step at 0")
        rl.at_least(self, {"eval_every": 1, "cap": 0, "distance_cost": 0})


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    for data in (cfg.data, cfg.hard, cfg.held_out):
        rl.check_inputs(
            model=cfg.model,
            data=data,
            reward=cfg.reward,
            prompts=cfg.prompts,
            trainer=cfg.trainer,
            sampling=cfg.sampling,
        )
    rl.check_evaluation(cfg)


def reward(prompt: rl.Prompt, sample: rl.Sample) -> dict[str, float]:
    right = float(sample.text.strip() == prompt.answer)
    ended = float(sample.status == "completed")
    return {"reward": right + 0.1 * ended, "right": right, "ended": ended}


def sign_advantage(groups: list[rl.Group]) -> list[NDArray[np.float64]]:
    return [np.sign(group.rewards - np.median(group.rewards)) for group in groups]


def cispo(out: LossInput, *, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    weight = (out.logprobs - out.old_logprobs).exp().clamp(max=cap).detach()
    return -weight * out.advantages * out.logprobs, {"train/weight": weight}


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    frozen = rl.FrozenConfig.like(cfg.trainer)
    ref = ctl.spawn(rl.FrozenModel, frozen, on=roles.train, model=cfg.model, name="ref")
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    tokenizer = rl.load_tokenizer(cfg.model)
    easy = rl.Prompts(cfg.data, cfg.prompts, tokenizer, cfg.sampling)
    hard = rl.Prompts(cfg.hard, cfg.prompts, tokenizer, cfg.sampling)
    held_out = rl.Prompts(cfg.held_out, replace(cfg.prompts, shuffle=False), tokenizer)
    greedy = replace(cfg.sampling, temperature=0.0, num_samples=1)
    evaluation = rl.Evaluation(ctl, cfg, rollout, cfg.steps)
    loss = partial(cispo, cap=cfg.cap)

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, easy=easy, hard=hard)):
        with ctl.phase("sync"):
            weights.push(version=step.index)
        evaluation.after(step.index)
        if step.index % cfg.eval_every == 0:
            with ctl.phase("eval"):
                groups = rollout.generate.call(held_out.take(len(held_out)), greedy)
            step.log({"held_out/reward": np.mean([group.rewards.mean() for group in groups])})
        num_hard = cfg.prompts_per_step * step.index // cfg.steps
        prompts = easy.take(cfg.prompts_per_step - num_hard) + hard.take(num_hard)
        first_uid = step.index * cfg.prompts_per_step
        prompts = [prompt.replace(uid=first_uid + i) for i, prompt in enumerate(prompts)]
        with ctl.phase("rollout"):
            groups = rollout.generate.call(prompts, cfg.sampling)
        kept = [group for group in groups if np.ptp(group.rewards) > 0] or groups
        step.log(groups, {"rollout/kept": len(kept) / len(groups)})
        with ctl.phase("train"):
            batch = rl.pack(kept, sign_advantage(kept))
            scores = ref.score.call(batch)
            if step.index == 0:
                rl.check_reference(trainer.score.call(batch), scores)
            distance = batch.rollout_logprobs - scores.values
            batch = replace(batch, advantages=batch.advantages - cfg.distance_cost * distance)
            stats = trainer.train_step.call(batch, loss)
        step.log(stats, {"ref/k1": distance.sum() / batch.mask.sum()})
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end(trainer, weights)
