"""Where two paths part: the first point whose rows differ, and for each later one whether it adds
to it.

An op introduces a difference if, fed with the other side's input, it still gives another output
than that side; it inherits one if its output differs only because its input did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmd_rl.kernels.rowwise.row_hash import wide_bits
from spmd_rl.microscope.diagnose.ulp import Histogram, histogram
from spmd_rl.microscope.replay.case import Case
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import Path
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Hashes, Transplant, Values

Status = Literal["equal", "inherited", "introduced"]


@dataclass(frozen=True)
class Finding:
    """One point: rows and elements that differ, how far (`plain`), and how far on the same input
    (`fed`).

    `rows` are those that differ on the same input or, if none does, at all.
    """

    point: Point
    num_rows: int
    unequal_rows: int
    introduced_rows: int
    rows: tuple[int, ...]
    plain: Histogram
    fed: Histogram
    largest_difference: float

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.plain.total // max(self.num_rows, 1)

    @property
    def status(self) -> Status:
        if self.introduced_rows:
            return "introduced"
        return "inherited" if self.unequal_rows else "equal"


@dataclass(frozen=True)
class Evidence:
    """What the side that was fed made of the other's inputs, and what the other side made of them."""

    fed: Values
    other: Values


@dataclass(frozen=True)
class Logprobs:
    """What both sides gave the tokens that both scored; `rows` predict them. Shape: all [M] on the
    CPU.
    """

    rows: Tensor
    left: Tensor
    right: Tensor

    @property
    def unequal(self) -> Tensor:
        """Shape: [M] bool."""
        return wide_bits(self.left) != wide_bits(self.right)

    @property
    def nan(self) -> Tensor:
        """On one side or both. Shape: [M] bool."""
        return self.left.isnan() | self.right.isnan()


@dataclass(frozen=True)
class Comparison:
    """`findings` in the order of the forward pass; empty where all hashes agree. `fed` names the
    path that was fed.

    `troubles` are sentences about what went wrong besides arithmetic. `parted` has how many rows'
    hashes differ, at each point where some do: a second run may not repeat it.
    """

    points: tuple[Point, ...]
    num_compared_rows: int
    findings: tuple[Finding, ...]
    fed: str
    evidence: Evidence | None = None
    troubles: tuple[str, ...] = ()
    parted: tuple[tuple[Point, int], ...] = ()
    logprobs: Logprobs | None = None

    @property
    def agree(self) -> bool:
        """Whether nothing differed and nothing else went wrong."""
        return not (self.findings or self.troubles)

    @property
    def first(self) -> Finding | None:
        return next((one for one in self.findings if one.status == "introduced"), None)


def compare(left: Path, right: Path, case: Case) -> Comparison:
    """Hash both; where hashes differ, run both again with their values, and one on the other's
    inputs.

    Fed is a side whose rows are all its own, if one is: what stands for several rows can take the
    values of one only. If none is, it is the engine: the rows that it reads of another sequence are
    not compared, all others are its own.
    """
    ours, theirs = Hashes(case.num_rows), Hashes(case.num_rows)
    left.run(case, ours)
    right.run(case, theirs)
    rows = unequal_rows(ours, theirs)
    points = tuple(sorted(rows, key=lambda point: point.place))
    troubles = (*left.troubles, *right.troubles)
    compared = sum(int(_both_seen(ours, theirs, point).sum()) for point in points)
    fed = _to_feed(left, right)
    parted = tuple((point, len(rows[point])) for point in points if len(rows[point]))
    logprobs = _logprobs(ours, theirs, points)
    if not parted and not (logprobs and logprobs.nan.any()):
        return Comparison(points, compared, (), fed.name, troubles=troubles, logprobs=logprobs)
    values = Values(case.num_rows), Values(case.num_rows)
    for path, kept in zip((left, right), values, strict=True):
        path.run(case, kept)
        kept.settle()
    troubles = (*troubles, *_not_numbers((left.name, right.name), values))
    if not parted:
        return Comparison(points, compared, (), fed.name, troubles=troubles, logprobs=logprobs)
    other = values[1] if fed is left else values[0]
    transplant = Transplant(other)
    fed.run(case, transplant)
    transplant.settle()
    evidence = Evidence(transplant, other)
    findings = tuple(_finding(point, *values, evidence) for point in points)
    return Comparison(points, compared, findings, fed.name, evidence, troubles, parted, logprobs)


def _to_feed(left: Path, right: Path) -> Path:
    if left.rows_are_distinct != right.rows_are_distinct:
        return left if left.rows_are_distinct else right
    return right if right.name == EnginePass.name and not right.rows_are_distinct else left


def unequal_rows(left: Hashes, right: Hashes) -> Mapping[Point, Tensor]:
    """Rows whose hashes differ, at each point that both sides have. Shape: each [rows]."""
    shared = [point for point in left.table if point in right.table]
    return {
        point: (_both_seen(left, right, point) & (left.table[point] != right.table[point])[:-1])
        .nonzero()[:, 0]
        .cpu()
        for point in shared
    }


def the(name: str) -> str:
    """A path's name in a sentence."""
    return name if name == "transformers" else f"the {name}"


def _logprobs(left: Hashes, right: Hashes, points: Sequence[Point]) -> Logprobs | None:
    point = points[-1] if points and points[-1].op == "logprob" else None
    if point is None or left.logprobs is None or right.logprobs is None:
        return None
    rows = _both_seen(left, right, point).cpu().nonzero()[:, 0]
    return Logprobs(rows, left.logprobs.cpu()[rows], right.logprobs.cpu()[rows])


def _not_numbers(names: tuple[str, str], values: tuple[Values, Values]) -> Iterator[str]:
    """A sentence for each side that makes NaN: where first, and how many."""
    for name, kept in zip(names, values, strict=True):
        for point in sorted(kept.table, key=lambda one: one.place):
            outputs = kept.table[point][kept.seen(point)]
            if count := int(outputs.isnan().sum()):
                of = f"{count:,} of {outputs.numel():,} outputs are NaN"
                yield f"{the(name).capitalize()}: {of} at {point}, the first place that has any."
                break


def _both_seen(left: Hashes | Values, right: Hashes | Values, point: Point) -> Tensor:
    """Shape: [rows] of the case."""
    return (left.seen(point) & right.seen(point))[: left.num_rows]


def _finding(point: Point, left: Values, right: Values, evidence: Evidence) -> Finding:
    rows = _both_seen(left, right, point).nonzero()[:, 0]
    x, y = left.table[point][rows], right.table[point][rows]
    fed, expected = evidence.fed.table[point][rows], evidence.other.table[point][rows]
    plain, introduced = _differ(x, y), _differ(fed, expected)
    where = introduced if introduced.any() else plain
    differences = (x.float() - y.float()).abs()
    differences = differences[~differences.isnan()]
    return Finding(
        point=point,
        num_rows=len(rows),
        unequal_rows=int(plain.sum()),
        introduced_rows=int(introduced.sum()),
        rows=tuple(rows[where].tolist()),
        plain=histogram(x, y),
        fed=histogram(fed, expected),
        largest_difference=float(differences.max()) if len(differences) else 0.0,
    )


def _differ(x: Tensor, y: Tensor) -> Tensor:
    """Shape: [rows, C] twice -> [rows] bool."""
    return (wide_bits(x) != wide_bits(y)).any(1) if len(x) else torch.zeros(0, dtype=torch.bool)
