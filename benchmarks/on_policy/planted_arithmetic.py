"""The recipe of examples/arithmetic with the engine of split_k.py."""

from __future__ import annotations

import spmd_rl as rl
from benchmarks.on_policy.split_k import SplitK, run_planted
from examples.arithmetic import recipe
from examples.arithmetic.recipe import Config, check

__all__ = ["Config", "SplitK", "check", "main"]


def main(ctl: rl.Controller, cfg: Config) -> None:
    run_planted(recipe, ctl, cfg)
