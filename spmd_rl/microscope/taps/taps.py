"""Taps: what is done with the output of each op. They hash, keep, replace or mark it.

A forward pass tells its tap which rows it computes, then runs the network under hooks. All of it
can be recorded in a CUDA graph, once a pass of the same shapes has run. A replay then writes to the
rows that the tensors of `begin_forward` name by then. Tables have one row more than the case, which
padding is written to. Without a tap nothing is hooked and nothing is paid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.profiler import record_function

from spmd_rl.kernels.rowwise.row_hash import write_row_hashes
from spmd_rl.microscope.taps.points import Point

MARK = "microscope"


class Tap(ABC):
    """Observes each output once; the forward pass goes on with what `observe` returns."""

    def begin_forward(self, rows: Tensor, locations: Tensor | None, scored: Tensor) -> None:
        """Note that a forward pass computes `rows` of the case, and logits of the first `scored`.

        Shape: rows [R]; locations [R], where the rows lie in an output, or None for its beginning.
        """
        self._rows, self._locations, self._scored = rows, locations, scored
        self._num_logits = 0

    def observe(self, point: Point, x: Tensor) -> Tensor:
        """Pass the output `x` of `point` to the tap, and return what the pass goes on with.

        Shape: x [T', ...], which has all locations; logits and log-probs only of scored rows.
        """
        if point.op == "logprob":
            self._num_logits = 0
            return self.record(point, x, self._scored[: len(x)], None)
        if point.op == "logits":  # may come in chunks
            rows = self._scored[self._num_logits : self._num_logits + len(x)]
            self._num_logits += len(x)
            return self.record(point, x, rows, None)
        return self.record(point, x, self._rows, self._locations)

    def skip_unobserved(self) -> None:  # noqa: B027 (only the profiler's tap cares)
        """Note that the kernels since the last point belong to no point."""

    @abstractmethod
    def record(self, point: Point, x: Tensor, rows: Tensor, locations: Tensor | None) -> Tensor:
        """Record `rows` of the case, which lie at `locations` of `x`.

        Returns what the forward pass goes on with.
        """

    @abstractmethod
    def fill_shared_rows(self, rows: Tensor, sources: Tensor) -> None:
        """After a run, fill in `rows` that were not computed: `sources` stood for them.

        Shape: both [R] on the CPU.
        """


class HashTap(Tap):
    """Keeps a hash of every row at every point, and the log-probs; nothing waits for the host.

    The hash is 0 if the row was not observed.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.table: dict[Point, Tensor] = {}
        self.logprobs: Tensor | None = None

    def observed(self, point: Point) -> Tensor:
        """Return which rows were observed. Shape: [num_rows + 1] bool."""
        return self.table[point] != 0

    def record(self, point: Point, x: Tensor, rows: Tensor, locations: Tensor | None) -> Tensor:
        if point not in self.table:
            self.table[point] = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=x.device)
        write_row_hashes(_rows_of(x, rows, locations), rows, self.table[point])
        if point.op == "logprob":
            if self.logprobs is None:
                self.logprobs = torch.full((self.num_rows + 1,), torch.nan, device=x.device)
            self.logprobs.index_copy_(0, rows, x.float())
        return x

    def fill_shared_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Leave them empty: hashes are of rows that were computed."""


class ValueTap(Tap):
    """Keeps the values of every row at every point.

    `computed` are the rows that this pass computed. `available` are those with values, which shared
    rows have too. Tables lie on the device of the pass until `move_to_host`.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.table: dict[Point, Tensor] = {}
        self.computed: dict[Point, Tensor] = {}
        self.available: dict[Point, Tensor] = {}

    def observed(self, point: Point) -> Tensor:
        """Return which rows were observed. Shape: [rows] bool."""
        return self.computed[point]

    def record(self, point: Point, x: Tensor, rows: Tensor, locations: Tensor | None) -> Tensor:
        values = _rows_of(x, rows, locations)
        if point not in self.table:
            self.table[point] = values.new_zeros(self.num_rows + 1, values.shape[1])
            self.computed[point] = torch.zeros(self.num_rows + 1, dtype=torch.bool, device=x.device)
        self.table[point].index_copy_(0, rows, values)
        self.computed[point].index_fill_(0, rows, True)
        return x

    def fill_shared_rows(self, rows: Tensor, sources: Tensor) -> None:
        for point, table in self.table.items():
            has_source = self.computed[point][sources.to(table.device)].cpu()
            target = rows[has_source].to(table.device)
            table[target] = table[sources[has_source].to(table.device)]
            self.available[point] = self.computed[point].index_fill(0, target, True)

    def move_to_host(self) -> None:
        """Move all tables to host memory, without the row of padding."""
        for point in self.table:
            available = self.available.get(point, self.computed[point])
            self.table[point] = self.table[point][:-1].cpu()
            self.computed[point] = self.computed[point][:-1].cpu()
            self.available[point] = available[:-1].cpu()


class PatchTap(ValueTap):
    """Keeps every output, then replaces it by the other side's (activation patching).

    So each op is observed at work on the other side's input.
    """

    def __init__(self, other: ValueTap) -> None:
        super().__init__(other.num_rows)
        self.other = other
        self._on_device: dict[Point, tuple[Tensor, ...]] = {}

    def record(self, point: Point, x: Tensor, rows: Tensor, locations: Tensor | None) -> Tensor:
        super().record(point, x, rows, locations)
        if point not in self.other.table:
            return x
        values, available = (
            tensor.index_select(0, rows) for tensor in self._patch(point, x.device)
        )
        if point.op == "logits":  # only the log-probs follow, which take any format
            x = x.to(torch.promote_types(x.dtype, values.dtype))
        own = _rows_of(x, rows, locations)
        patched = torch.where(available[:, None], values.to(x.dtype), own)
        return _with_rows(x, patched, locations)

    def _patch(self, point: Point, device: torch.device) -> tuple[Tensor, ...]:
        """Return the other side's values and which of them it has, with a row for padding."""
        if point not in self._on_device:
            tables = self.other.table[point], self.other.available[point]
            self._on_device[point] = tuple(
                torch.cat([table, torch.zeros_like(table[:1])]).to(device) for table in tables
            )
        return self._on_device[point]


class ProfilerTap(Tap):
    """Leaves a mark in a profile after each op, and notes which rows were computed together.

    `forward_of` is the forward pass of each row, as the host ran it. Rows that a CUDA graph
    computed belong to the pass before its recording, which had its shapes and ran its kernels.
    `step_of` is the step of each row, counted on the device, so replays count too.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._num_forwards = 0

    def begin_forward(self, rows: Tensor, locations: Tensor | None, scored: Tensor) -> None:
        super().begin_forward(rows, locations, scored)
        if self._num_forwards == 0:
            self._make_tables(rows.device)
        if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._num_forwards += 1
        self._step += 1
        self.forward_of.index_fill_(0, rows, self._num_forwards - 1)
        self.step_of.index_copy_(0, rows, self._step.expand(len(rows)))
        self._mark("", "")

    def record(self, point: Point, x: Tensor, rows: Tensor, locations: Tensor | None) -> Tensor:
        self._mark(point.layer, point.op)
        return x

    def skip_unobserved(self) -> None:
        self._mark("", "")

    def fill_shared_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Leave them empty: kernels are those of rows that were computed."""

    def _make_tables(self, device: torch.device) -> None:
        self.forward_of, self.step_of = torch.full((2, self.num_rows + 1), -1, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)

    def _mark(self, layer: int | str, op: str) -> None:
        with record_function(f"{MARK}|{self._num_forwards - 1}|{layer}|{op}"):
            pass


def _with_rows(x: Tensor, flat: Tensor, locations: Tensor | None) -> Tensor:
    """Return `x` with the rows that `_rows_of` gives replaced by `flat`. Shape: flat [R, C]."""
    if locations is None:
        locations = torch.arange(len(flat), device=x.device)
    return x.index_copy(0, locations, flat.view(len(flat), *x.shape[1:]))


def _rows_of(x: Tensor, rows: Tensor, locations: Tensor | None) -> Tensor:
    """Return `rows` of `x`, flattened. Shape: x [T', ...]; returns [R, C]."""
    flat = x.flatten(1) if x.dim() > 1 else x[:, None]
    return flat[: len(rows)] if locations is None else flat.index_select(0, locations)
