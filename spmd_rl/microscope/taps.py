"""What is done with an op's output on its way: hash it, keep it, mark it, or put another's in its place.

A path tells its tap which rows a forward pass computes, then runs the network under `watch`. With no tap nothing is
hooked and nothing is paid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.profiler import record_function

from spmd_rl.kernels.row_hash import row_hashes
from spmd_rl.microscope.points import Point

MARK = "microscope"


class Tap(ABC):
    """`take` sees each output once; what it returns is what the forward pass goes on with."""

    def begin(self, rows: Tensor, places: Tensor, scored: Tensor) -> None:
        """A forward pass computes `rows` [R], whose values lie at `places` [R]; its logits are of rows `scored` [M]."""
        self._rows, self._places, self._scored, self._num_logits = rows, places, scored, 0

    def see(self, point: Point, x: Tensor) -> Tensor:
        """Shape: x [T', ...], with at least as many rows as any place; logits and log-probs only the scored ones."""
        if point.op == "logprob":
            return self.take(point, x, self._scored, torch.arange(len(x), device=x.device))
        if point.op == "logits":  # may come in chunks
            rows = self._scored[self._num_logits : self._num_logits + len(x)]
            self._num_logits += len(x)
            return self.take(point, x, rows, torch.arange(len(x), device=x.device))
        return self.take(point, x, self._rows, self._places)

    @abstractmethod
    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Take note of `rows` of the case, at `places` of x; returns what the forward pass goes on with."""


class Hashes(Tap):
    """A hash of every row at every point; nothing else is kept, nothing waits for the host."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.table: dict[Point, Tensor] = {}
        self.seen: dict[Point, Tensor] = {}

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        if point not in self.table:
            self.table[point] = torch.zeros(self.num_rows, dtype=torch.int64, device=x.device)
            self.seen[point] = torch.zeros(self.num_rows, dtype=torch.bool, device=x.device)
        self.table[point].index_copy_(0, rows, row_hashes(x.flatten(1) if x.dim() > 1 else x[:, None])[places])
        self.seen[point].index_fill_(0, rows, True)
        return x


class Values(Tap):
    """Every row at every point, in host memory."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.table: dict[Point, Tensor] = {}
        self.seen: dict[Point, Tensor] = {}

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        part = (x.flatten(1) if x.dim() > 1 else x[:, None])[places].cpu()
        if point not in self.table:
            self.table[point] = torch.zeros(self.num_rows, part.shape[1], dtype=part.dtype)
            self.seen[point] = torch.zeros(self.num_rows, dtype=torch.bool)
        self.table[point].index_copy_(0, rows.cpu(), part)
        self.seen[point].index_fill_(0, rows.cpu(), True)
        return x


class Transplant(Values):
    """Keeps every output, then goes on with the other side's: so each op is seen at work on the other's input."""

    def __init__(self, other: Values) -> None:
        super().__init__(other.num_rows)
        self.other = other

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        super().take(point, x, rows, places)
        if point not in self.other.table:
            return x
        known = self.other.seen[point][rows.cpu()]
        values = self.other.table[point][rows.cpu()[known]].to(x.device, x.dtype)
        return x.index_copy(0, places[known.to(places.device)], values.view(-1, *x.shape[1:]))


class Marks(Tap):
    """Leaves a mark in a profile after each op, and remembers in which forward pass a row was computed."""

    def __init__(self, num_rows: int) -> None:
        self.forward_of = torch.full((num_rows,), -1)
        self.sizes: list[tuple[int, int]] = []  # rows and scored rows of each forward pass

    def begin(self, rows: Tensor, places: Tensor, scored: Tensor) -> None:
        super().begin(rows, places, scored)
        self.forward_of[rows.cpu()] = len(self.sizes)
        self.sizes.append((len(rows), len(scored)))
        self._mark("", "")

    def take(self, point: Point, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        self._mark(point.layer, point.op)
        return x

    def _mark(self, layer: int | str, op: str) -> None:
        with record_function(f"{MARK}|{len(self.sizes) - 1}|{layer}|{op}"):
            pass
