"""Reward model: Bradley-Terry training of a value head on pairs of answers.

spmd-rl run reward_model --model PATH --data pairs.jsonl --eval.data held_out.jsonl

The folder `hf` of the run is a model for sequence classification, from which `rlhf` learns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

import spmd_rl as rl
from spmd_rl.algo.dpo import bradley_terry_loss
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.data.pairs import PreferencePairs
from spmd_rl.recipes import configs
from spmd_rl.recipes.held_out import check_supervised, pair_evaluation
from spmd_rl.types.sequence_ends import sequence_ends


@dataclass(frozen=True)
class Config(configs.PairRecipe):
    model: str  # Hugging Face folder; the head of a language model is replaced by a value head
    margin: float = 0.0  # by how much the chosen answer's reward should be larger
    center_coef: float = 0.0  # weight of a term that keeps rewards around zero
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(lr=1e-5))
    trainer_role: ClassVar[type[rl.Role]] = rl.ValueTrainer  # for the plan

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "pairs_per_step": 1})
        rl.at_least(self, {"margin": 0, "center_coef": 0})
        rl.check_steps(self)


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    check_supervised(cfg)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.ValueTrainer, cfg.trainer, on=roles.train, model=cfg.model)
    tokenizer = rl.load_tokenizer(cfg.model)
    pairs = PreferencePairs(cfg.data, cfg.prompts, tokenizer, for_reward_model=True)
    loss = partial(bradley_terry_loss, margin=cfg.margin, center_coef=cfg.center_coef)

    def rewards_of(batch: rl.Batch) -> NDArray[np.floating]:
        return trainer.rewards.call(batch).values

    num_steps = rl.num_steps(cfg, pairs, cfg.pairs_per_step)
    evaluation = pair_evaluation(
        ctl, cfg, [trainer], tokenizer, rewards_of, num_steps, for_reward_model=True
    )
    start = ctl.resume(trainer=trainer, pairs=pairs)
    start = rl.first_step(cfg, start, [trainer], pairs, cfg.pairs_per_step)

    for step in ctl.steps(num_steps, start):
        evaluation.after(step.index)
        with ctl.phase("train"):
            batch = sequence_ends(pack_pairs(pairs.next(cfg.pairs_per_step)))
            stats = trainer.train_step.call(batch, loss)
        step.log(stats, pairs.metrics())
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end()
