"""The recipe of the demo, whose steps wait for a driver, for beside_commit.py.

spmd-rl run benchmarks.beside_demo --config examples/arithmetic/demo.toml
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spmd_rl as rl
from benchmarks.peer import Laps
from examples.arithmetic import recipe
from examples.arithmetic.recipe import Config, check

__all__ = ["Config", "check", "main"]


class LappedController:
    """A controller each of whose steps is a lap."""

    def __init__(self, ctl: rl.Controller) -> None:
        self._ctl = ctl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctl, name)

    def steps(self, *counts: int) -> Iterator[Any]:
        laps, code = Laps(), str(Path(rl.__file__).resolve().parents[1])
        for step in self._ctl.steps(*counts):
            laps.lap(code=code)
            yield step


def main(ctl: Any, cfg: Config) -> None:
    recipe.main(LappedController(ctl), cfg)  # type: ignore[arg-type]
