"""The recipe `grpo` with the engine of split_k.py."""

from __future__ import annotations

import spmd_rl as rl
from benchmarks.on_policy.split_k import SplitK, run_planted
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "SplitK", "check", "main"]


def main(ctl: rl.Controller, cfg: Config) -> None:
    run_planted(grpo, ctl, cfg)
