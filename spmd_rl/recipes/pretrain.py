"""Continued pre-training: text documents, packed so that every step has the same number of tokens.

spmd-rl run pretrain --model PATH --data documents.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field

import spmd_rl as rl
from spmd_rl.data.documents import DocumentConfig, Documents
from spmd_rl.evaluation.held_out_config import DocumentEvalConfig, held_out_sets
from spmd_rl.recipes import configs
from spmd_rl.recipes.held_out import check_supervised, token_evaluation


@dataclass(frozen=True, kw_only=True)
class Config(configs.SupervisedRecipe):
    # a text in each record, or .txt: a file, or a table of files and weights (docs/data.md)
    data: str | dict[str, float]
    tokens_per_step: int = 65536  # of the documents; no chat template is applied
    eval: DocumentEvalConfig = field(default_factory=DocumentEvalConfig)
    documents: DocumentConfig = field(default_factory=DocumentConfig)
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "tokens_per_step": 2})
        rl.check_steps(self)


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    check_supervised(cfg)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    tokenizer = rl.load_tokenizer(cfg.model)
    documents = Documents(cfg.data, cfg.documents, tokenizer)
    size = documents.count_tokens() if cfg.epochs else 0
    num_steps = rl.num_steps(cfg, size, cfg.tokens_per_step)
    held_out = {
        name: Documents(data, own, tokenizer).one_pass()
        for name, (data, own) in held_out_sets(cfg.eval, cfg.documents).items()
    }
    evaluation = token_evaluation(ctl, cfg, trainer, held_out, num_steps)
    start = ctl.resume(trainer=trainer, documents=documents)
    start = rl.first_step(cfg, start, [trainer], documents, cfg.tokens_per_step)

    for step in ctl.steps(num_steps, start):
        evaluation.after(step.index)
        with ctl.phase("train"):
            batch = rl.pack_sft(documents.next(cfg.tokens_per_step))
            stats = trainer.train_step.call(batch, rl.sft_loss)
        learned = float(batch.mask.sum())
        step.log(stats, {"data/epoch": documents.epoch, "data/learned_tokens": learned})
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
    evaluation.at_end()
