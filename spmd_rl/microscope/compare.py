"""Where two paths part: the first point whose rows differ, and for each later one whether it adds to it.

An op introduces a difference if, fed with the other side's input, it still gives another output than that side; it
inherits one if its output differs only because its input did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmd_rl.kernels.row_hash import wide_bits
from spmd_rl.microscope.case import Case
from spmd_rl.microscope.paths import Path
from spmd_rl.microscope.points import Point
from spmd_rl.microscope.taps import Hashes, Transplant, Values
from spmd_rl.microscope.ulp import Histogram, histogram

Status = Literal["equal", "inherited", "introduced"]


@dataclass(frozen=True)
class Finding:
    """One point: rows and elements that differ, how far (`plain`), and how far on the same input (`fed`).

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
class Comparison:
    """`findings` in the order of the forward pass; empty where all hashes agree. `fed` names the path that was fed.

    `troubles` are sentences about what went wrong besides arithmetic.
    """

    points: tuple[Point, ...]
    num_compared_rows: int
    findings: tuple[Finding, ...]
    fed: str
    evidence: Evidence | None = None
    troubles: tuple[str, ...] = ()

    @property
    def first(self) -> Finding | None:
        return next((one for one in self.findings if one.status == "introduced"), None)


def compare(left: Path, right: Path, case: Case) -> Comparison:
    """Hash both; where hashes differ, run both again with their values, and one on the other's inputs.

    Fed is a side whose rows are all its own, if one is: what stands for several rows can take the values of one only.
    """
    ours, theirs = Hashes(case.num_rows), Hashes(case.num_rows)
    left.run(case, ours)
    right.run(case, theirs)
    rows = unequal_rows(ours, theirs)
    points = tuple(sorted(rows, key=lambda point: point.place))
    troubles = (*left.troubles, *right.troubles)
    compared = sum(int(_both_seen(ours, theirs, point).sum()) for point in points)
    fed = right if right.rows_are_distinct and not left.rows_are_distinct else left
    if not any(len(unequal) for unequal in rows.values()):
        return Comparison(points, compared, (), fed.name, troubles=troubles)
    values = Values(case.num_rows), Values(case.num_rows)
    for path, kept in zip((left, right), values, strict=True):
        path.run(case, kept)
        kept.settle()
    other = values[1] if fed is left else values[0]
    transplant = Transplant(other)
    fed.run(case, transplant)
    transplant.settle()
    evidence = Evidence(transplant, other)
    findings = tuple(_finding(point, *values, evidence) for point in points)
    return Comparison(points, compared, findings, fed.name, evidence, troubles)


def unequal_rows(left: Hashes, right: Hashes) -> Mapping[Point, Tensor]:
    """Rows whose hashes differ, at each point that both sides have. Shape: each [rows]."""
    shared = [point for point in left.table if point in right.table]
    return {
        point: (_both_seen(left, right, point) & (left.table[point] != right.table[point])[:-1]).nonzero()[:, 0].cpu()
        for point in shared
    }


def _both_seen(left: Hashes | Values, right: Hashes | Values, point: Point) -> Tensor:
    """Shape: [rows] of the case."""
    return (left.seen(point) & right.seen(point))[: left.num_rows]


def _finding(point: Point, left: Values, right: Values, evidence: Evidence) -> Finding:
    rows = _both_seen(left, right, point).nonzero()[:, 0]
    x, y = left.table[point][rows], right.table[point][rows]
    fed, expected = evidence.fed.table[point][rows], evidence.other.table[point][rows]
    plain, introduced = _differ(x, y), _differ(fed, expected)
    where = introduced if introduced.any() else plain
    return Finding(
        point=point,
        num_rows=len(rows),
        unequal_rows=int(plain.sum()),
        introduced_rows=int(introduced.sum()),
        rows=tuple(rows[where].tolist()),
        plain=histogram(x, y),
        fed=histogram(fed, expected),
        largest_difference=float((x.float() - y.float()).abs().max()),
    )


def _differ(x: Tensor, y: Tensor) -> Tensor:
    """Shape: [rows, C] twice -> [rows] bool."""
    return (wide_bits(x) != wide_bits(y)).any(1) if len(x) else torch.zeros(0, dtype=torch.bool)
