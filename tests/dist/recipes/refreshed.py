"""Recipe of supervised steps, with a reference that is refreshed and a critic beside the trainer.

For the test beside it. The critic learns the log-probs that the reference gives.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import spmd_rl as rl
from spmd_rl.train.value_trainer import Critic


@dataclass(frozen=True)
class Config:
    model: str
    data: str
    steps: int = 5
    refresh_every: int = 2
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.PolicySplit = field(default_factory=rl.PolicySplit)
    prompts: rl.PromptConfig = field(default_factory=rl.PromptConfig)
    trainer: rl.TrainerConfig = field(default_factory=rl.TrainerConfig)


def squares(out: rl.ValueInput) -> Any:
    return (out.values - out.columns["reference_logprobs"]) ** 2, {}


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    frozen = rl.FrozenConfig.like(cfg.trainer)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    placed = {
        extra.name: extra.placement(roles)
        for extra in (
            rl.ExtraRole("reference", frozen, cfg.model, is_refreshed=True),
            rl.ExtraRole("critic", cfg.trainer, cfg.model),
        )
    }
    reference = ctl.spawn(
        rl.FrozenModel, frozen, on=placed["reference"], model=cfg.model, name="reference"
    )
    critic = ctl.spawn(Critic, cfg.trainer, on=placed["critic"], model=cfg.model, name="critic")
    link = ctl.link(trainer, reference)
    pairs = rl.SftPairs(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    parts = {"trainer": trainer, "pairs": pairs, "reference": reference, "critic": critic}
    for step in ctl.steps(cfg.steps, ctl.resume(**parts)):
        if step.index and step.index % cfg.refresh_every == 0:
            link.push(version=step.index)
        batch = rl.pack_sft(pairs.next(8))
        scores = reference.score.call(batch)
        batch = batch.with_columns(reference_logprobs=scores)
        critic_loss = critic.train_step.call(batch, squares)["train/loss"]
        values = critic.values.call(batch).values
        stats = trainer.train_step.call(replace(batch, columns={}), rl.sft_loss)
        step.log(stats)
        step.log(
            {
                "test/reference": float(np.sum(scores.values, dtype=np.float64)),
                "test/version": reference.version.call(),
                "test/critic": critic_loss,
                "test/values": float(np.sum(values, dtype=np.float64)),
            }
        )
    critic.export_hf.call(str(ctl.run_folder / "critic"))
