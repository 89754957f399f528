"""A language model learns to add: supervised warm-up from random weights, then GRPO.

spmd-rl run examples/arithmetic/recipe.py --config examples/arithmetic/demo.toml --nproc 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import spmd_rl as rl
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check
from spmd_rl.recipes.num_steps import check_schedule

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True)
class Config(grpo.Config):
    warmup_data: str = ""  # pairs that the supervised steps learn from; "" means data
    warmup_steps: int = 100  # supervised steps before the first rollout
    warmup_pairs: int = 256  # prompts with their answers in each of them
    warmup_lr: float = 3e-3  # learning rate of the supervised steps
    phases: ClassVar[rl.Phases] = rl.COLOCATED.with_roles(
        **{"warm-up": {"train": rl.ALL, "reference": rl.ALL}}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.refuse_sampler(self.sampler, self.hooks)
        rl.at_least(self, {"warmup_steps": 0, "warmup_pairs": 1, "warmup_lr": 0})
        if not self.epochs:
            check_schedule(self, self.steps + self.warmup_steps)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    tokenizer = rl.load_tokenizer(cfg.model)
    pairs = rl.SftPairs(cfg.warmup_data or cfg.data, cfg.prompts, tokenizer)
    prompts = rl.Prompts(cfg.data, cfg.prompts, tokenizer, cfg.sampling)
    num_steps = rl.num_steps(cfg, prompts, cfg.prompts_per_step, before=cfg.warmup_steps)
    evaluation = rl.Evaluation(ctl, cfg, rollout, num_steps, first=cfg.start_step)

    start = ctl.resume(trainer=trainer, prompts=prompts, **update.savers)
    start = rl.first_step(cfg, start, update.trainers, prompts, cfg.prompts_per_step)
    with ctl.phase("warm-up"):
        for step in ctl.warmup(cfg.warmup_steps, start):
            batch = rl.pack_sft(pairs.next(cfg.warmup_pairs))
            stats = trainer.train_step.call(batch, rl.sft_loss, lr=cfg.warmup_lr)
            step.log({"warmup/loss": stats["train/loss"], "train/tokens": stats["train/tokens"]})
    if start == 0 and not cfg.kl.reference:  # it is the policy after the warm-up
        update.refresh_reference(version=0)

    for step in ctl.steps(num_steps, start):
        with ctl.phase("sync"):
            weights.push(version=step.index)
        evaluation.after(step.index)
        with ctl.phase("rollout"):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, stats)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end(trainer, weights)
