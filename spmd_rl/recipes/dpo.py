"""DPO: direct preference optimization on pairs of answers, with a frozen reference model.

spmd-rl run dpo --model PATH --data pairs.jsonl --eval.data held_out.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import spmd_rl as rl
from spmd_rl.algo.dpo import dpo_loss
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.data.pairs import PreferencePairs
from spmd_rl.evaluation.held_out_scores import dpo_rewards
from spmd_rl.mesh.split import Placements
from spmd_rl.recipes import configs
from spmd_rl.recipes.held_out import check_supervised, pair_evaluation
from spmd_rl.train.extra_role import reference_roles


@dataclass(frozen=True)
class Config(configs.PairRecipe):
    reference: str = ""  # Hugging Face folder of the reference; "": the first weights of model
    beta: float = 0.1  # how much the policy is held to the reference
    label_smoothing: float = 0.0  # share of the pairs that may be labelled the wrong way round
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"  # docs/algorithms.md has the formulas

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "pairs_per_step": 1, "label_smoothing": 0})
        rl.check_steps(self)
        if not self.beta > 0:
            raise rl.ConfigError(f"beta = {self.beta}: expected more than 0")
        if self.label_smoothing >= 0.5 or (self.label_smoothing and self.loss_type != "sigmoid"):
            raise rl.ConfigError(
                f"label_smoothing = {self.label_smoothing}: expected less than 0.5, and 0 for a "
                "loss_type other than sigmoid"
            )

    def extra_roles(self) -> list[rl.ExtraRole]:
        """Return the reference model, for the plan; a trainer of adapters needs none."""
        return reference_roles(self.trainer, self.model, self.reference)


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    check_supervised(cfg)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    references = spawned_references(ctl, cfg, roles)
    score_reference = references[0].score if references else trainer.score_base

    def scored(batch: rl.Batch) -> rl.Batch:
        return batch.with_columns(reference_logprobs=score_reference.call(batch))

    def rewards_of(batch: rl.Batch) -> NDArray[np.floating]:
        return dpo_rewards(scored(batch), trainer.score.call(batch), beta=cfg.beta)

    tokenizer = rl.load_tokenizer(cfg.model)
    pairs = PreferencePairs(cfg.data, cfg.prompts, tokenizer)
    loss = partial(
        dpo_loss,
        beta=cfg.beta,
        label_smoothing=cfg.label_smoothing,
        loss_type=cfg.loss_type,
    )

    num_steps = rl.num_steps(cfg, pairs, cfg.pairs_per_step)
    evaluation = pair_evaluation(ctl, cfg, [trainer, *references], tokenizer, rewards_of, num_steps)
    start = ctl.resume(trainer=trainer, pairs=pairs)
    start = rl.first_step(cfg, start, [trainer], pairs, cfg.pairs_per_step)

    for step in ctl.steps(num_steps, start):
        evaluation.after(step.index)
        with ctl.phase("train"):
            batch = scored(pack_pairs(pairs.next(cfg.pairs_per_step)))
            stats = trainer.train_step.call(batch, loss)
        step.log(stats, pairs.metrics())
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end()


def spawned_references(ctl: rl.Controller, cfg: Config, roles: Placements) -> list[rl.FrozenModel]:
    """Return the reference model; none where it is the base of the trainer's adapters."""
    return [
        ctl.spawn(rl.FrozenModel, role.cfg, on=roles.train, model=role.model, name=role.name)
        for role in cfg.extra_roles()
    ]
