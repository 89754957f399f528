"""Supervised fine-tuning: the trainer of GRPO without an engine.

spmd-rl run sft --model PATH --data train.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import spmd_rl as rl


@dataclass(frozen=True)
class TrainSplit:
    train: rl.RoleSplit = field(default_factory=rl.RoleSplit)


@dataclass(frozen=True)
class Config:
    model: str  # Hugging Face folder
    data: str  # file of answers or conversations (docs/data.md); a slice as path@[a:b]
    steps: int = 200  # training steps of the whole run
    pairs_per_step: int = 64  # prompts with their answers, or conversations
    # which assistant messages of a conversation are learned; its own "weight" goes before this
    learn: Literal["all", "last"] = "all"
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: TrainSplit = field(default_factory=TrainSplit)
    prompts: rl.PromptConfig = field(default_factory=rl.PromptConfig)
    # Every token is a target, so steps may be larger than those of a policy gradient. verl's SFT
    # has the same learning rate.
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "pairs_per_step": 1})


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_inputs(
        model=cfg.model, data=cfg.data, prompts=cfg.prompts, trainer=cfg.trainer, learn=cfg.learn
    )


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    pairs = rl.SftPairs(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model), cfg.learn)

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, pairs=pairs)):
        with ctl.phase("train"):
            batch = rl.pack_sft(pairs.next(cfg.pairs_per_step))
            stats = trainer.train_step.call(batch, rl.sft_loss)
        step.log(stats)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
