"""Forward pass that was run elsewhere: its outputs are read from a dump of hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.microscope.foreign.dump import Dump, locate_sequences
from spmd_rl.microscope.foreign.layout import SCORED_OPS
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap


class DumpPass:
    """One side of a comparison whose ops ran in another program.

    Nothing can be patched into it, so the other side takes its values.
    """

    rows_are_distinct = True
    is_recorded = True
    model: Any = None
    split = 0

    def __init__(self, dump: Dump, device: torch.device, name: str = "dump") -> None:
        """`device` is that of the other side."""
        self.name = name
        self.dump = dump
        self.device = device
        self.dtype = dump.dtype
        self.facts: dict[str, int] = {}
        self.problems: list[str] = []

    def run(self, case: ReplayCase, tap: Tap) -> None:
        for number, start in enumerate(locate_sequences(self.dump, case)):
            self._show_sequence(case, tap, number, start)

    def _show_sequence(self, case: ReplayCase, tap: Tap, number: int, start: int) -> None:
        """Show the tap one sequence, which begins at row `start` of the dump."""
        rows = torch.from_numpy(case.rows(number)).to(self.device)
        positions = case.scored_positions(number)
        tap.begin_forward(rows, None, rows[torch.from_numpy(positions).to(self.device)])
        first = int(np.searchsorted(self.dump.scored, start + positions[0]))
        scored, all_rows = (first, first + len(positions)), (start, start + len(rows))
        for point in self.dump.points:
            x = self.dump.read(point, *(scored if point.op in SCORED_OPS else all_rows))
            tap.observe(point, as_observed(point, x).to(self.device))


def as_observed(point: Point, x: Tensor) -> Tensor:
    """Return `x` in the shape in which a pass shows it: log-probs are a vector."""
    return x[:, 0] if point.op == "logprob" else x
