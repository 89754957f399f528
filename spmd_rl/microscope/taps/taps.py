"""What is done with an op's output on its way: hash it, keep it, mark it, or put another's in its
place.

A path tells its tap which rows a forward pass computes, then runs the network under `watch`. All of
it can be recorded in a CUDA graph once a pass of the same shapes has run; a replay then writes for
the rows that `begin`'s tensors name by then. Tables have one row more than the case: what lands
there is padding. With no tap nothing is hooked or paid.
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
    """`take` sees each output once; what it returns is what the forward pass goes on with."""

    def begin(self, rows: Tensor, places: Tensor | None, scored: Tensor) -> None:
        """A forward pass computes `rows` [R], whose values lie at `places` [R], or first; its
        logits are of the first rows of `scored`."""
        self._rows, self._places, self._scored, self._num_logits = rows, places, scored, 0

    def see(self, point: Point, x: Tensor) -> Tensor:
        """Shape: x [T', ...], with at least as many rows as any place; logits and log-probs only
        the scored ones.
        """
        if point.op == "logprob":
            self._num_logits = 0
            return self.take(point, x, self._scored[: len(x)], None)
        if point.op == "logits":  # may come in chunks
            rows = self._scored[self._num_logits : self._num_logits + len(x)]
            self._num_logits += len(x)
            return self.take(point, x, rows, None)
        return self.take(point, x, self._rows, self._places)

    def skip(self) -> None:  # noqa: B027 (only who looks at kernels cares)
        """What ran since the last point belongs to none."""

    @abstractmethod
    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
        """Take note of `rows` of the case, at `places` of x; returns what the forward pass goes on
        with.
        """

    @abstractmethod
    def share(self, rows: Tensor, sources: Tensor) -> None:
        """After a run: `rows` were not computed, `sources` stood for them. Shape: both [R] on the
        CPU.
        """


class Hashes(Tap):
    """A hash of every row at every point, 0 where it was not seen, and the log-probs; nothing waits
    for the host.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.table: dict[Point, Tensor] = {}
        self.logprobs: Tensor | None = None

    def seen(self, point: Point) -> Tensor:
        return self.table[point] != 0

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
        if point not in self.table:
            self.table[point] = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=x.device)
        write_row_hashes(_rows_of(x, rows, places), rows, self.table[point])
        if point.op == "logprob":
            if self.logprobs is None:
                self.logprobs = torch.full((self.num_rows + 1,), torch.nan, device=x.device)
            self.logprobs.index_copy_(0, rows, x.float())
        return x

    def share(self, rows: Tensor, sources: Tensor) -> None:
        """Each hash is of a row that was computed."""


class Values(Tap):
    """Every row at every point. `known` are the rows whose values are there, `computed` those that
    this path computed.

    They lie on the path's device while it runs, and in host memory after `settle`.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.table: dict[Point, Tensor] = {}
        self.computed: dict[Point, Tensor] = {}
        self.known: dict[Point, Tensor] = {}

    def seen(self, point: Point) -> Tensor:
        return self.computed[point]

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
        part = _rows_of(x, rows, places)
        if point not in self.table:
            self.table[point] = part.new_zeros(self.num_rows + 1, part.shape[1])
            self.computed[point] = torch.zeros(self.num_rows + 1, dtype=torch.bool, device=x.device)
        self.table[point].index_copy_(0, rows, part)
        self.computed[point].index_fill_(0, rows, True)
        return x

    def share(self, rows: Tensor, sources: Tensor) -> None:
        for point, table in self.table.items():
            there = self.computed[point][sources.to(table.device)].cpu()
            to, origin = rows[there].to(table.device), sources[there].to(table.device)
            table[to] = table[origin]
            self.known[point] = self.computed[point].index_fill(0, to, True)

    def settle(self) -> None:
        for point in self.table:
            known = self.known.get(point, self.computed[point])
            self.table[point] = self.table[point][:-1].cpu()
            self.computed[point], self.known[point] = (
                self.computed[point][:-1].cpu(),
                known[:-1].cpu(),
            )


class Transplant(Values):
    """Keeps every output, then goes on with the other side's: so each op is seen at work on the
    other's input.
    """

    def __init__(self, other: Values) -> None:
        super().__init__(other.num_rows)
        self.other = other
        self._given: dict[Point, tuple[Tensor, ...]] = {}

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
        super().take(point, x, rows, places)
        if point not in self.other.table:
            return x
        if point not in self._given:
            given = self.other.table[point], self.other.known[point]
            self._given[point] = tuple(
                torch.cat([one, torch.zeros_like(one[:1])]).to(x.device) for one in given
            )
        values, known = (one.index_select(0, rows) for one in self._given[point])
        if point.op == "logits":  # nothing but the log-probs follows, which take any format
            x = x.to(torch.promote_types(x.dtype, values.dtype))
        mine = x[: len(rows)] if places is None else x.index_select(0, places)
        mixed = torch.where(
            known[:, None], values.to(x.dtype), mine.flatten(1) if x.dim() > 1 else mine[:, None]
        )
        at = torch.arange(len(rows), device=x.device) if places is None else places
        return x.index_copy(0, at, mixed.view_as(mine))


class Marks(Tap):
    """Leaves a mark in a profile after each op, and remembers which rows were computed together.

    `forward_of` has each row's forward pass as the host ran it: what a CUDA graph computed counts
    to the pass before its recording, which had its shapes and ran its kernels. `step_of` is counted
    on the device, replays and all.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._num_forwards = 0

    def begin(self, rows: Tensor, places: Tensor | None, scored: Tensor) -> None:
        super().begin(rows, places, scored)
        if self._num_forwards == 0:
            self.forward_of, self.step_of = torch.full(
                (2, self.num_rows + 1), -1, device=rows.device
            )
            self._step = torch.zeros(1, dtype=torch.int64, device=rows.device)
        if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._num_forwards += 1
        self._step += 1
        self.forward_of.index_fill_(0, rows, self._num_forwards - 1)
        self.step_of.index_copy_(0, rows, self._step.expand(len(rows)))
        self._mark("", "")

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
        self._mark(point.layer, point.op)
        return x

    def skip(self) -> None:
        self._mark("", "")

    def share(self, rows: Tensor, sources: Tensor) -> None:
        """Kernels are those of the rows that were computed."""

    def _mark(self, layer: int | str, op: str) -> None:
        with record_function(f"{MARK}|{self._num_forwards - 1}|{layer}|{op}"):
            pass


def _rows_of(x: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
    """Shape: [R, C], of x [T', ...]."""
    flat = x.flatten(1) if x.dim() > 1 else x[:, None]
    return flat[: len(rows)] if places is None else flat.index_select(0, places)
