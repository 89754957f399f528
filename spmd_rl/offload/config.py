"""Settings of sleep: whether roles that share ranks give memory back in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spmd_rl.config.rules import require

GIB = 1 << 30


@dataclass(frozen=True)
class OffloadConfig:
    """Whether roles sleep while others of their ranks work, and what they may keep in host memory.

    Which memory sleeps in which phase is declared by the recipe (offload/phases.py).
    """

    # auto: roles sleep where they do not all fit on a GPU at once; never on CPUs
    sleep: Literal["auto", "always", "never"] = "auto"
    host_gib: float = 0.0  # host memory of a rank for copies; 0: what the cgroup leaves

    def __post_init__(self) -> None:
        fits = math.isfinite(self.host_gib) and self.host_gib >= 0
        require(fits, "host_gib", self.host_gib, "0 (what the cgroup leaves) or more, and finite")

    @property
    def host_bytes(self) -> int:
        return int(self.host_gib * GIB)
