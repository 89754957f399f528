"""Recipe of a test: what a push of adapters moves, and what a link says of an engine with another
base.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import spmd_rl as rl
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True)
class Config(grpo.Config):
    other_base: bool = False  # whether the engine draws its base from another seed


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    settings = rl.rollout_settings(cfg)
    if cfg.other_base:
        settings["lora"] = replace(settings["lora"], random_seed=cfg.trainer.seed + 1)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **settings)
    pushed = ctl.link(trainer, rollout, alias=False).push(version=0)
    facts = {
        "bytes_moved": pushed.bytes_moved,
        "num_tensors": pushed.num_tensors,
        "num_verified": pushed.num_verified,
    }
    (ctl.run_folder / "pushed.json").write_text(json.dumps(facts))
