"""GRPO on a model that sums as two ranks that share it do, for tests: none shares it here."""

from __future__ import annotations

from typing import Any

from spmd_rl.controller.controller import Controller
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]

ROLES = ("train", "infer", "reference", "critic")


def main(ctl: Controller, cfg: Any) -> None:
    ctl._planned = {name: {**ctl._planned.get(name, {}), "row_shards": 2} for name in ROLES}
    grpo.main(ctl, cfg)
