"""Comparison of two forward passes, op by op.

An op introduces a difference if it gives another output than the other side on the other side's
input. It inherits a difference if its output differs only because its input did. To tell the two
apart, one pass runs again with the other's outputs patched in (activation patching).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spmd_rl.kernels.rowwise.row_hash import wide_bits
from spmd_rl.microscope.diagnose.flips import RouteFlip, first_flip
from spmd_rl.microscope.diagnose.ulp import Histogram, histogram, rows_differ
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import HashTap, PatchTap, ValueTap

PointStatus = Literal["equal", "inherited", "introduced"]
_NAMES = {
    "megatron": "Megatron-core",
    "transformers": "transformers",
    "sglang": "SGLang",
    "sglang-deterministic": "SGLang in its deterministic mode",
}


@dataclass(frozen=True)
class PointResult:
    """How the outputs of one point differ, as the passes ran and on the same input.

    `differing_rows` are those that differ on the same input or, if none does, at all.
    `largest_share` is the largest difference on the same input, as a share of its row's largest
    output, and `worst_row` is that row.
    """

    point: Point
    num_rows: int
    num_unequal_rows: int
    num_introduced_rows: int
    differing_rows: tuple[int, ...]
    as_run: Histogram
    same_input: Histogram
    largest_difference: float
    largest_share: float = 0.0
    worst_row: int = -1

    @property
    def num_columns(self) -> int:
        """The number of elements of a row."""
        return self.as_run.total // max(self.num_rows, 1)

    @property
    def status(self) -> PointStatus:
        if self.num_introduced_rows:
            return "introduced"
        return "inherited" if self.num_unequal_rows else "equal"


@dataclass(frozen=True)
class PatchEvidence:
    """The outputs of the patched side on the other side's inputs, and those of the other side."""

    patched: ValueTap
    other: ValueTap


@dataclass(frozen=True)
class LogprobPair:
    """Log-probs of the tokens that both sides scored; `rows` predict them.

    Shape: all [M] on the CPU.
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
        """Whether a side or both have NaN. Shape: [M] bool."""
        return self.left.isnan() | self.right.isnan()


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    `results` are in the order of the forward pass, and empty if all hashes agree. `patched` names
    the pass that was patched. `problems` are sentences on what went wrong besides arithmetic.
    `unequal_points` counts the rows with unequal hashes, at each point that has any; the second run
    may not repeat them.
    """

    points: tuple[Point, ...]
    num_compared_rows: int
    results: tuple[PointResult, ...]
    patched: str
    evidence: PatchEvidence | None = None
    problems: tuple[str, ...] = ()
    unequal_points: tuple[tuple[Point, int], ...] = ()
    logprobs: LogprobPair | None = None
    flip: RouteFlip | None = None

    @property
    def agree(self) -> bool:
        """Whether nothing differed and nothing else went wrong."""
        return not (self.results or self.problems)

    @property
    def first_introduced(self) -> PointResult | None:
        return next((result for result in self.results if result.status == "introduced"), None)


def compare(left: ForwardPass, right: ForwardPass, case: ReplayCase) -> Comparison:
    """Compare the two passes by hashes of all outputs, and by values where hashes differ.

    If hashes differ, both passes run again with their values kept. Then one runs with the other's
    outputs patched in.
    """
    hashes = HashTap(case.num_rows), HashTap(case.num_rows)
    left.run(case, hashes[0])
    right.run(case, hashes[1])
    patched = _choose_patched(left, right)
    by_hashes = _compare_hashes(*hashes, patched.name, (*left.problems, *right.problems))
    has_nan = by_hashes.logprobs is not None and bool(by_hashes.logprobs.nan.any())
    if not by_hashes.unequal_points and not has_nan:
        return by_hashes
    return _compare_values(left, right, case, by_hashes, patched)


def _compare_values(
    left: ForwardPass,
    right: ForwardPass,
    case: ReplayCase,
    by_hashes: Comparison,
    patched: ForwardPass,
) -> Comparison:
    """Return the comparison with what values tell: NaN, and which op introduces a difference."""
    values = left.values(case), right.values(case)
    nan_problems = _nan_problems((left.name, right.name), values)
    problems = (*by_hashes.problems, *nan_problems)
    if not by_hashes.unequal_points:
        return replace(by_hashes, problems=problems)
    other = values[1] if patched is left else values[0]
    evidence = PatchEvidence(patched.values(case, PatchTap(other)), other)
    results = tuple(_result(point, *values, evidence) for point in by_hashes.points)
    flip = first_flip(*values, by_hashes.points)
    return replace(by_hashes, results=results, evidence=evidence, problems=problems, flip=flip)


def _compare_hashes(
    left: HashTap, right: HashTap, patched: str, problems: tuple[str, ...]
) -> Comparison:
    """Return the comparison as far as hashes tell."""
    rows = unequal_rows(left, right)
    points = tuple(sorted(rows, key=lambda point: point.order))
    return Comparison(
        points,
        sum(int(_both_observed(left, right, point).sum()) for point in points),
        (),
        patched,
        problems=problems,
        unequal_points=tuple((point, len(rows[point])) for point in points if len(rows[point])),
        logprobs=_logprobs(left, right, points),
    )


def _choose_patched(left: ForwardPass, right: ForwardPass) -> ForwardPass:
    """Return the pass to patch: one whose rows are all its own, if there is one.

    A row that stands for several sequences can take the values of one only. If both passes have
    such rows, the engine is patched: rows that it reads of another sequence are not compared, and
    all others are its own. A pass that ran elsewhere is never patched.
    """
    if left.is_recorded or right.is_recorded:
        return right if left.is_recorded else left
    if left.rows_are_distinct != right.rows_are_distinct:
        return left if left.rows_are_distinct else right
    return right if right.name == EnginePass.name and not right.rows_are_distinct else left


def unequal_rows(left: HashTap, right: HashTap) -> Mapping[Point, Tensor]:
    """Return the rows whose hashes differ, at each point of both sides. Shape: each [rows]."""
    rows = {}
    for point in left.table:
        if point in right.table:
            differs = (left.table[point] != right.table[point])[:-1]
            differs = _both_observed(left, right, point) & differs
            rows[point] = differs.nonzero()[:, 0].cpu()
    return rows


def name_in_sentence(name: str) -> str:
    """Return the name of a forward pass as sentences use it."""
    return _NAMES.get(name, f"the {name}")


def begin_sentence(subject: str) -> str:
    """Return `subject` with a capital letter."""
    return subject[:1].upper() + subject[1:]


def _logprobs(left: HashTap, right: HashTap, points: Sequence[Point]) -> LogprobPair | None:
    point = points[-1] if points and points[-1].op == "logprob" else None
    if point is None or left.logprobs is None or right.logprobs is None:
        return None
    rows = _both_observed(left, right, point).cpu().nonzero()[:, 0]
    return LogprobPair(rows, left.logprobs.cpu()[rows], right.logprobs.cpu()[rows])


def _nan_problems(names: tuple[str, str], values: tuple[ValueTap, ValueTap]) -> Iterator[str]:
    """Yield a sentence for each side that computes NaN: at which point first, and how many."""
    for name, tap in zip(names, values, strict=True):
        for point in sorted(tap.table, key=lambda point: point.order):
            outputs = tap.table[point][tap.observed(point)]
            if count := int(outputs.isnan().sum()):
                share = f"{count:,} of {outputs.numel():,} outputs are NaN"
                side = begin_sentence(name_in_sentence(name))
                yield f"{side}: {share} at {point}, the first place that has any."
                break


def _both_observed(left: HashTap | ValueTap, right: HashTap | ValueTap, point: Point) -> Tensor:
    """Shape: [rows] of the case."""
    return (left.observed(point) & right.observed(point))[: left.num_rows]


def _result(point: Point, left: ValueTap, right: ValueTap, evidence: PatchEvidence) -> PointResult:
    rows = _both_observed(left, right, point).nonzero()[:, 0]
    x, y = left.table[point][rows], right.table[point][rows]
    patched = evidence.patched.table[point][rows]
    expected = evidence.other.table[point][rows]
    is_unequal, is_introduced = rows_differ(x, y), rows_differ(patched, expected)
    is_shown = is_introduced if is_introduced.any() else is_unequal
    shares = _shares(point, patched, expected)
    return PointResult(
        point=point,
        num_rows=len(rows),
        num_unequal_rows=int(is_unequal.sum()),
        num_introduced_rows=int(is_introduced.sum()),
        differing_rows=tuple(rows[is_shown].tolist()),
        as_run=histogram(x, y),
        same_input=histogram(patched, expected),
        largest_difference=_largest_difference(x, y),
        largest_share=float(shares.max()) if len(shares) else 0.0,
        worst_row=int(rows[shares.argmax()]) if len(shares) else -1,
    )


def _largest_difference(x: Tensor, y: Tensor) -> float:
    """Return the largest difference that is a number; 0 if there is none."""
    differences = (x.float() - y.float()).abs()
    differences = differences[~differences.isnan()]
    return float(differences.max()) if len(differences) else 0.0


def _shares(point: Point, x: Tensor, y: Tensor) -> Tensor:
    """Return the largest difference of each row, as a share of its largest element.

    A row with NaN on one side only has an infinite share. Log-probs near 0 count as if they were 1.
    Shape: [rows, C] twice -> [rows].
    """
    x, y = x.float(), y.float()
    differences = torch.where(x.isnan() & y.isnan() | (x == y), 0.0, (x - y).abs())
    least = 1.0 if point.op == "logprob" else torch.finfo(torch.float32).tiny
    largest = y.abs().nan_to_num(nan=0.0, posinf=torch.finfo(y.dtype).max).amax(1).clamp(min=least)
    return (differences.nan_to_num(nan=torch.inf).amax(1) / largest) if len(x) else largest
