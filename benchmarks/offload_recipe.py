"""The recipe `grpo` of this code or of an earlier commit's, whose steps wait for a driver, for
offload_step.py. It names only what both have.

spmd-rl run benchmarks.offload_recipe --model FOLDER --data FILE \
    --reward benchmarks.offload_recipe:reward
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spmd_rl as rl
from benchmarks.peer import Laps
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]


def reward(prompt: rl.Prompt, sample: rl.Sample) -> float:
    """Return a reward by which the samples of a prompt differ, whatever their texts are."""
    return float(sum(map(int, sample.tokens)) % 7)


class LappedController:
    """A controller each of whose steps is a lap. The reply has what the step measured."""

    def __init__(self, ctl: rl.Controller) -> None:
        self._ctl = ctl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctl, name)

    def steps(self, *counts: int) -> Iterator[Any]:
        laps, code = Laps(), str(Path(rl.__file__).resolve().parents[1])
        facts: dict[str, Any] = {}
        for step in self._ctl.steps(*counts):
            laps.lap(code=code, **facts)
            logged: dict[str, float] = {}
            step.log = _noting(step.log, logged)
            yield step
            measured = {**getattr(step, "measured", {}), **logged}
            facts = {"phases": dict(step.phase_s), "measured": measured}


def _noting(log: Any, logged: dict[str, float]) -> Any:
    """Return `log`, with the metrics that it is given noted in `logged` too."""

    def both(*what: Any) -> None:
        for item in what:
            if isinstance(item, dict):
                logged.update(item)
        log(*what)

    return both


def main(ctl: Any, cfg: Config) -> None:
    grpo.main(LappedController(ctl), cfg)  # type: ignore[arg-type]
