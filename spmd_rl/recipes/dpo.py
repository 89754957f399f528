"""DPO: direct preference optimization on pairs of answers, with a frozen reference model.

spmd-rl run dpo --model PATH --data pairs.jsonl --held_out held_out.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import spmd_rl as rl
from spmd_rl.recipes.sft import TrainSplit


@dataclass(frozen=True)
class Config:
    model: str  # Hugging Face folder
    data: str  # file of prompts with two answers (docs/data.md); a slice as path@[a:b]
    held_out: str = ""  # pairs to evaluate with; "": none
    eval_every: int = 20  # steps between evaluations; the last step is always followed by one
    steps: int = 200  # training steps of the whole run
    pairs_per_step: int = 32  # each a prompt with two answers
    reference: str = ""  # Hugging Face folder of the reference; "": the first weights of model
    beta: float = 0.1  # how much the policy is held to the reference
    label_smoothing: float = 0.0  # share of the pairs that may be labelled the wrong way round
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"  # docs/algorithms.md has the formulas
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: TrainSplit = field(default_factory=TrainSplit)
    prompts: rl.PairConfig = field(default_factory=rl.PairConfig)
    trainer: rl.TrainerConfig = field(default_factory=rl.TrainerConfig)

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "pairs_per_step": 1, "eval_every": 1, "label_smoothing": 0})
        if not self.beta > 0:
            raise rl.ConfigError(f"beta = {self.beta}: expected more than 0")
        if self.label_smoothing >= 0.5 or (self.label_smoothing and self.loss_type != "sigmoid"):
            raise rl.ConfigError(
                f"label_smoothing = {self.label_smoothing}: expected less than 0.5, and 0 for a "
                "loss_type other than sigmoid"
            )

    def extra_roles(self) -> list[rl.ExtraRole]:
        """Return the reference model, for the plan."""
        frozen = rl.FrozenConfig.like(self.trainer)
        if self.reference:
            frozen = replace(frozen, init="folder")
        return [rl.ExtraRole("reference", frozen, self.reference or self.model)]


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    for data in filter(None, (cfg.data, cfg.held_out)):
        rl.check_inputs(model=cfg.model, data=data, prompts=cfg.prompts, trainer=cfg.trainer)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    (role,) = cfg.extra_roles()
    reference = ctl.spawn(
        rl.FrozenModel, role.cfg, on=roles.train, model=role.model, name=role.name
    )

    def scored(batch: rl.Batch) -> rl.Batch:
        return batch.with_columns(reference_logprobs=reference.score.call(batch))

    pairs = rl.PreferencePairs(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    held_out = scored(rl.pack_pairs(all_pairs(cfg))) if cfg.held_out else None
    loss = partial(
        rl.dpo_loss,
        beta=cfg.beta,
        label_smoothing=cfg.label_smoothing,
        loss_type=cfg.loss_type,
    )

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, pairs=pairs)):
        with ctl.phase("train"):
            batch = scored(rl.pack_pairs(pairs.next(cfg.pairs_per_step)))
            stats = trainer.train_step.call(batch, loss)
        step.log(stats)
        if held_out and is_eval_due(cfg, step.index):
            with ctl.phase("eval"):
                policy = trainer.score.call(held_out)
            step.log(rl.dpo_evaluation(held_out, policy, beta=cfg.beta))
    trainer.export_hf.call(str(ctl.run_folder / "hf"))


def all_pairs(cfg: Config) -> list[rl.PreferencePair]:
    """Return the held-out pairs, in the order of the file."""
    in_order = replace(cfg.prompts, shuffle=False)
    pairs = rl.PreferencePairs(cfg.held_out, in_order, rl.load_tokenizer(cfg.model))
    return pairs.next(len(pairs))


def is_eval_due(cfg: Config, index: int) -> bool:
    """Return whether an evaluation follows step `index`."""
    return (index + 1) % cfg.eval_every == 0 or index + 1 == cfg.steps
