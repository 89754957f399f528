"""RanksPass: what the ranks of a role computed together, as one side of a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from spmd_rl.microscope.diagnose.ulp import rows_differ
from spmd_rl.microscope.foreign.dump import as_observed
from spmd_rl.microscope.ranks.part_tap import COLUMNS
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap, ValueTap


@dataclass(frozen=True)
class RankShare:
    """What one rank has of a point. Shape: rows [R] of the case, values [R, own columns]."""

    rank: int
    rows: Tensor
    first_column: int
    values: Tensor

    @property
    def columns(self) -> slice:
        return slice(self.first_column, self.first_column + self.values.shape[1])

    def differs(self, whole: Tensor) -> Tensor:
        """Return in which of its rows it has something else. Shape: whole [rows, C]; [R] bool."""
        expected = whole[self.rows, self.columns].to(self.values.dtype)
        return rows_differ(self.values, expected)


class RanksPass(ForwardPass):
    """One side of a comparison, which ran on several ranks: nothing can be patched into it.

    Where ranks have the same rows, a sequence is shown as the rank has it that parts first.
    """

    is_recorded = True

    def __init__(
        self, name: str, files: Sequence[Path], case: ReplayCase, alone: ForwardPass
    ) -> None:
        """`alone` is the pass of one rank, with which it is compared."""
        super().__init__(alone.device, alone.dtype)
        self.name, self.facts = name, {"ranks": len(files)}
        self.shares: dict[Point, list[RankShare]] = {}
        for rank, file in enumerate(files):
            self._read(rank, file)
        rank_of = self._shown_ranks(case, alone.values(case))
        self._whole = {point: _joined(shares, rank_of) for point, shares in self.shares.items()}

    def _read(self, rank: int, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            for name, first in json.loads(file.metadata()[COLUMNS]).items():
                layer, _, op = name.partition(".")
                rows = file.get_tensor(f"{name}.rows").nonzero()[:, 0]
                share = RankShare(rank, rows, first, file.get_tensor(f"{name}.values")[rows])
                self.shares.setdefault(Point(int(layer), op), []).append(share)

    def _shown_ranks(self, case: ReplayCase, expected: ValueTap) -> Tensor:
        """Return which rank shows each row. Shape: [rows]."""
        count = len(case.sequences)
        number_of = torch.from_numpy(np.repeat(np.arange(count), case.lengths))
        shown = torch.full((count,), -1)
        points = expected.table.keys() & self.shares
        for point in sorted(points, key=lambda point: point.order):
            for share in self.shares[point]:
                parted = number_of[share.rows[share.differs(expected.table[point])]]
                shown[parted] = torch.where(shown[parted] < 0, share.rank, shown[parted])
        return shown.clamp(min=0)[number_of]

    def run(self, case: ReplayCase, tap: Tap) -> None:
        for number in range(len(case.sequences)):
            rows = torch.from_numpy(case.rows(number))
            tap.begin_forward(rows.to(self.device), None, rows[:0].to(self.device))
            for point in sorted(self._whole, key=lambda point: point.order):
                values, has_values = self._whole[point]
                own = rows[has_values[rows]]
                x = as_observed(point, values[own]).to(self.device)
                tap.record(point, x, own.to(self.device), None)

    def ranks_that_differ(self, point: Point, other: Tensor) -> list[int]:
        """Return the ranks that have something else at `point`. Shape: other [rows, columns]."""
        return [share.rank for share in self.shares[point] if share.differs(other).any()]


def _joined(shares: Sequence[RankShare], rank_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole values, and which rows have any; each row as `rank_of` it has it.

    Shape: rank_of [rows]; returns [rows, C] and [rows].
    """
    width = max(share.columns.stop for share in shares)
    values = shares[0].values.new_zeros(len(rank_of), width)
    has_values = torch.zeros(len(rank_of), dtype=torch.bool)
    for share in shares:
        values[share.rows, share.columns] = share.values
        has_values[share.rows] = True
    for share in shares:
        is_shown = rank_of[share.rows] == share.rank
        values[share.rows[is_shown], share.columns] = share.values[is_shown]
    return values, has_values
