"""The recipe `grpo`, whose steps wait for a driver and say what a push moved, for lora_step.py.

spmd-rl run benchmarks.lora_recipe --model FOLDER --data FILE \
    --reward benchmarks.offload_recipe:reward
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.offload_recipe import LappedController
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]

PUSH_BYTES = "push/bytes"


class PushingController(LappedController):
    """A controller whose steps measure the bytes of their pushes too."""

    def __init__(self, ctl: Any) -> None:
        super().__init__(ctl)
        self.step: Any = None

    def steps(self, *counts: int) -> Iterator[Any]:
        for self.step in super().steps(*counts):
            yield self.step

    def link(self, *ends: Any) -> _MeasuredLink:
        return _MeasuredLink(self, self._ctl.link(*ends))


class _MeasuredLink:
    """A link that notes what each push moved."""

    def __init__(self, controller: PushingController, link: Any) -> None:
        self._controller, self._link = controller, link

    def push(self, version: int) -> None:
        stats = self._link.push(version=version)
        self._controller.step.measured[PUSH_BYTES] = float(stats.bytes_moved)


def main(ctl: Any, cfg: Config) -> None:
    grpo.main(PushingController(ctl), cfg)  # type: ignore[arg-type]
