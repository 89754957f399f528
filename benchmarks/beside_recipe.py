"""Recipe of this code or of an earlier commit's that generates what its driver asks for, for
beside_commit.py. It names only what both have.

spmd-rl run benchmarks.beside_recipe --model FOLDER
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import spmd_rl as rl
from benchmarks.peer import Laps


@dataclass(frozen=True)
class Config:
    model: str
    vocab: int = 100  # the prompts' ids are below
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.Split = field(default_factory=rl.Split)
    engine: rl.NativeEngineConfig = field(default_factory=rl.NativeEngineConfig)


def main(ctl: rl.Controller, cfg: Config) -> None:
    on = ctl.world.split(cfg.split).infer
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=on, model=cfg.model, seed=0)
    code = str(Path(rl.__file__).resolve().parents[1])
    laps = Laps()
    while True:
        asked = laps.request()
        if "calls" in asked:
            began = time.perf_counter()
            for _ in range(asked["calls"]):
                rollout.stats.call()
            laps.reply(seconds=time.perf_counter() - began, code=code)
            continue
        rng = np.random.default_rng(asked["seed"])
        tokens = rng.integers(2, cfg.vocab, (asked["prompts"], asked["length"]), dtype=np.int32)
        prompts = [rl.Prompt(uid, one) for uid, one in enumerate(tokens)]
        sampling = rl.SamplingConfig(
            num_samples=asked["samples"],
            max_tokens=asked["new_tokens"],
            stop_ids=tuple(asked["stop_ids"]),
            ignore_eos=True,
        )
        began = time.perf_counter()
        groups = rollout.generate.call(prompts, sampling)
        seconds = time.perf_counter() - began
        num_tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
        laps.reply(seconds=seconds, num_tokens=num_tokens, code=code)
