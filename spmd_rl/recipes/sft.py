"""Supervised fine-tuning: the trainer of GRPO without an engine.

spmd-rl run sft --model PATH --data train.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import spmd_rl as rl
from spmd_rl.evaluation.held_out_config import HeldOutConfig
from spmd_rl.recipes import configs
from spmd_rl.recipes.held_out import check_supervised, held_out_answers, token_evaluation


@dataclass(frozen=True, kw_only=True)
class Config(configs.SupervisedRecipe):
    # answers or conversations: a file, or a table of files and weights (docs/data.md)
    data: str | dict[str, float]
    pairs_per_step: int = 64  # prompts with their answers, or conversations
    # which assistant messages of a conversation are learned; its own "weight" goes before this
    learn: Literal["all", "last"] = "all"
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    prompts: rl.PromptConfig = field(default_factory=rl.PromptConfig)
    # Every token is a target, so steps may be larger than those of a policy gradient. verl's SFT
    # has the same learning rate.
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "pairs_per_step": 1})
        rl.check_steps(self)


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    check_supervised(cfg, cfg.learn)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    tokenizer = rl.load_tokenizer(cfg.model)
    pairs = rl.SftPairs(cfg.data, cfg.prompts, tokenizer, cfg.learn)
    num_steps = rl.num_steps(cfg, pairs, cfg.pairs_per_step)
    held_out = held_out_answers(cfg.eval, cfg.prompts, tokenizer, cfg.learn)
    evaluation = token_evaluation(ctl, cfg, trainer, held_out, num_steps)
    start = ctl.resume(trainer=trainer, pairs=pairs)
    start = rl.first_step(cfg, start, [trainer], pairs, cfg.pairs_per_step)

    for step in ctl.steps(num_steps, start):
        evaluation.after(step.index)
        with ctl.phase("train"):
            batch = rl.pack_sft(pairs.next(cfg.pairs_per_step))
            stats = trainer.train_step.call(batch, rl.sft_loss)
        step.log(stats, pairs.metrics())
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end()
