"""Reward model: Bradley-Terry training of a value head on pairs of answers.

spmd-rl run reward_model --model PATH --data pairs.jsonl --held_out held_out.jsonl

The folder `hf` of the run is a model for sequence classification, from which `rlhf` learns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import spmd_rl as rl
from spmd_rl.recipes.sft import TrainSplit


@dataclass(frozen=True)
class Config:
    model: str  # Hugging Face folder; the head of a language model is replaced by a value head
    data: str  # file of prompts with two answers (docs/data.md); a slice as path@[a:b]
    held_out: str = ""  # pairs to evaluate with; "": none
    eval_every: int = 20  # steps between evaluations; the last step is always followed by one
    steps: int = 200  # training steps of the whole run
    pairs_per_step: int = 32  # each a prompt with two answers
    margin: float = 0.0  # by which the chosen answer's reward should exceed the other's
    center_coef: float = 0.0  # weight of a term that keeps rewards around zero
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: TrainSplit = field(default_factory=TrainSplit)
    prompts: rl.PairConfig = field(default_factory=rl.PairConfig)
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(lr=1e-5))
    trainer_role: ClassVar[type[rl.Role]] = rl.ValueTrainer  # for the plan

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "pairs_per_step": 1, "eval_every": 1})
        rl.at_least(self, {"margin": 0, "center_coef": 0})


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    for data in filter(None, (cfg.data, cfg.held_out)):
        rl.check_inputs(model=cfg.model, data=data, prompts=cfg.prompts, trainer=cfg.trainer)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.ValueTrainer, cfg.trainer, on=roles.train, model=cfg.model)
    tokenizer = rl.load_tokenizer(cfg.model)
    pairs = rl.PreferencePairs(cfg.data, cfg.prompts, tokenizer)
    held_out = None
    if cfg.held_out:
        rest = rl.PreferencePairs(cfg.held_out, replace(cfg.prompts, shuffle=False), tokenizer)
        held_out = rl.pack_pairs(rest.next(len(rest)))
    loss = partial(rl.bradley_terry_loss, margin=cfg.margin, center_coef=cfg.center_coef)

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, pairs=pairs)):
        with ctl.phase("train"):
            batch = rl.sequence_ends(rl.pack_pairs(pairs.next(cfg.pairs_per_step)))
            stats = trainer.train_step.call(batch, loss)
        step.log(stats)
        if held_out and ((step.index + 1) % cfg.eval_every == 0 or step.index + 1 == cfg.steps):
            with ctl.phase("eval"):
                rewards = trainer.rewards.call(held_out)
            step.log(rl.preference_metrics(rewards.values))
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
