"""Recipe of this code or of an earlier commit's that generates what its driver asks for, for
beside_commit.py. It names only what both have.

spmd-rl run benchmarks.beside_recipe --model FOLDER
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

import spmd_rl as rl
from benchmarks.peer import Laps
from spmd_rl.rollout import engine as engines

# before engines of other kinds
EngineConfig: Any = getattr(engines, "NativeEngineConfig", None) or engines.EngineConfig  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Config:
    model: str
    vocab: int = 100  # the prompts' ids are below
    reward: str = ""
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.Split = field(default_factory=rl.Split)
    engine: EngineConfig = field(default_factory=EngineConfig)


def main(ctl: rl.Controller, cfg: Config) -> None:
    on = ctl.world.split(cfg.split).infer
    if "model" in {one.name for one in fields(EngineConfig)}:
        engine = replace(cfg.engine, model=cfg.model, reward=cfg.reward)
        rollout = ctl.spawn(rl.Rollout, engine, on=on)
    else:
        settings = {"model": cfg.model, "seed": 0, "reward": cfg.reward}
        rollout = ctl.spawn(rl.Rollout, cfg.engine, on=on, **settings)
    laps = Laps()
    while True:
        asked = laps.request()
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
        code = str(Path(rl.__file__).resolve().parents[1])
        laps.reply(seconds=seconds, num_tokens=num_tokens, code=code)
