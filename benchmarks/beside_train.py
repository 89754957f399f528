"""Recipe of this code or of an earlier commit's that trains on what its driver asks for, for
beside_commit.py. It names only what both have.

spmd-rl run benchmarks.beside_train --model FOLDER
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import spmd_rl as rl
from benchmarks.peer import Laps
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


@dataclass(frozen=True)
class Config:
    model: str
    vocab: int = 100  # token ids are below
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.Split = field(default_factory=rl.Split)
    trainer: rl.TrainerConfig = field(default_factory=rl.TrainerConfig)


def main(ctl: rl.Controller, cfg: Config) -> None:
    trainer = ctl.spawn(
        rl.Trainer, cfg.trainer, on=ctl.world.split(cfg.split).train, model=cfg.model
    )
    code = str(Path(rl.__file__).resolve().parents[1])
    laps = Laps()
    while True:
        asked = laps.request()
        batch = batch_of(asked["samples"], asked["length"], cfg.vocab, asked["seed"])
        began = time.perf_counter()
        trainer.train_step.call(batch, rl.grpo_loss)
        laps.reply(seconds=time.perf_counter() - began, code=code)


def batch_of(num_samples: int, length: int, vocab: int, seed: int) -> rl.Batch:
    """Return samples of `length` random token ids each, a quarter of which are the prompt."""
    rng = np.random.default_rng(seed)
    num_new = length - length // 4
    groups = []
    for uid in range(num_samples):
        tokens = rng.integers(2, vocab, length, dtype=np.int32)
        sample = Sample(
            uid,
            0,
            tokens[-num_new:],
            np.full(num_new, -1.0, np.float32),
            np.full(num_new, -1, np.int32),
            "truncated",
        )
        sample = sample.replace(reward=float(uid % 2), mask=np.ones(num_new, np.bool_))
        groups.append(Group(Prompt(uid, tokens[:-num_new]), [sample]))
    return rl.pack(groups, [np.array([1.0 - uid % 2 * 2]) for uid in range(num_samples)])
