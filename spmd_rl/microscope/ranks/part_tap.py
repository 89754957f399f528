"""PartTap: keeps what one rank has of each point: some columns, or some rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.microscope.taps.points import BEFORE_LAYERS, Point, definition, is_in_layer
from spmd_rl.microscope.taps.taps import ValueTap
from spmd_rl.model.spec import ModelSpec

COLUMNS = "columns"  # the key of a file's metadata: the first column of each point


@dataclass(frozen=True)
class OwnPart:
    """A rank among those along tp, which share matrices, and along cp, which share tokens.

    With `cuts_rows`, ranks along tp share rows between layers, as a trainer's do.
    """

    tp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    cuts_rows: bool = False


class PartTap(ValueTap):
    """Keeps values at the rows of the case, as far as this rank has them."""

    def __init__(self, num_rows: int, spec: ModelSpec, part: OwnPart) -> None:
        super().__init__(num_rows)
        self._spec, self._part = spec, part

    def begin_forward(self, rows: Tensor, locations: Tensor | None, scored: Tensor) -> None:
        """Note the rows of the pass, of which ranks along cp have one after the other in turn."""
        rank, size = self._part.cp
        self._all_scored = scored
        if size > 1:
            assert locations is not None
            place = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=rows.device)
            place[rows] = locations
            scored = scored[place[scored] % size == rank]
            own = locations % size == rank
            rows, locations = rows[own], locations[own] // size
        super().begin_forward(rows, locations, scored)

    def observe(self, point: Point, x: Tensor) -> Tensor:
        if point.op == "logprob":  # ranks have told each other theirs by now
            return self.record(point, x, self._all_scored[: len(x)], None)
        return super().observe(point, x)

    def record(self, point: Point, x: Tensor, rows: Tensor, locations: Tensor | None) -> Tensor:
        rank, size = self._part.tp
        if size > 1 and self._part.cuts_rows and self._is_residual(point):
            assert locations is not None
            own = locations // len(x) == rank
            rows, locations = rows[own], locations[own] - rank * len(x)
        return super().record(point, x, rows, locations)

    def _is_residual(self, point: Point) -> bool:
        """Whether the point is of the residual stream between layers."""
        found = definition(point, self._spec)
        is_hidden = found is not None and found.shape == (self._spec.hidden_size,)
        return is_hidden and (is_in_layer(point.op) or point.op in BEFORE_LAYERS)

    def save(self, path: Path) -> None:
        """Write the values, and which rows have them."""
        self.move_to_host()
        tensors, columns = {}, {}
        for point, values in self.table.items():
            name = f"{point.layer}.{point.op}"
            tensors[f"{name}.values"] = values
            tensors[f"{name}.rows"] = self.computed[point]
            columns[name] = self._first_column(point, values.shape[1])
        save_file(tensors, path, metadata={COLUMNS: json.dumps(columns)})

    def _first_column(self, point: Point, width: int) -> int:
        """Return where this rank's columns begin; ranks beyond the heads repeat some."""
        found = definition(point, self._spec)
        assert found is not None
        rank, size = self._part.tp
        whole = prod(found.shape)
        return 0 if width == whole else rank * whole // size // width * width
