"""Continued pre-training: text documents, packed so that every step has the same number of tokens.

spmd-rl run pretrain --model PATH --data documents.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field

import spmd_rl as rl
from spmd_rl.recipes.sft import TrainSplit


@dataclass(frozen=True)
class Config:
    model: str  # Hugging Face folder
    data: str  # file with a text in each record, or .txt; a slice as path@[a:b]
    steps: int = 200  # training steps of the whole run
    tokens_per_step: int = 65536  # of the documents; no chat template is applied
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: TrainSplit = field(default_factory=TrainSplit)
    documents: rl.DocumentConfig = field(default_factory=rl.DocumentConfig)
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "tokens_per_step": 2})


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_inputs(model=cfg.model, data=cfg.data, documents=cfg.documents, trainer=cfg.trainer)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    documents = rl.Documents(cfg.data, cfg.documents, rl.load_tokenizer(cfg.model))

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, documents=documents)):
        with ctl.phase("train"):
            batch = rl.pack_sft(documents.next(cfg.tokens_per_step))
            stats = trainer.train_step.call(batch, rl.sft_loss)
        learned = float(batch.mask.sum())
        step.log(stats, {"data/epoch": documents.epoch, "data/learned_tokens": learned})
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
