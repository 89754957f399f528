"""Router flips: tokens that go to other experts in one forward pass than in the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spmd_rl.microscope.diagnose.ulp import rows_differ
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import ValueTap
from spmd_rl.model.layers.moe import ROUTES


@dataclass(frozen=True)
class RouteFlip:
    """The first flip of a comparison: of the first layer that has any, the first row.

    `left` and `right` are its experts. `num_flips` counts the rows of `num_layers` layers.
    `parted_at` is the first point at which any row differs, if that is before the flip.
    """

    point: Point
    row: int
    left: tuple[int, ...]
    right: tuple[int, ...]
    num_flips: int
    num_layers: int
    parted_at: Point | None


def first_flip(left: ValueTap, right: ValueTap, points: Sequence[Point]) -> RouteFlip | None:
    """Return the first flip of two passes as they ran; None if all tokens go the same way.

    `points` are in the order of the forward pass.
    """
    flipped = {}
    for point in points:
        if point.op == ROUTES:
            num_experts = left.table[point].shape[1] // 2
            rows = _unequal_rows(left, right, point, slice(0, num_experts))
            if len(rows):
                flipped[point] = rows
    if not flipped:
        return None
    point, rows = next(iter(flipped.items()))
    row, num_experts = int(rows[0]), left.table[point].shape[1] // 2
    before = points[: points.index(point)]
    experts = [tuple(map(int, side.table[point][row, :num_experts])) for side in (left, right)]
    return RouteFlip(
        point=point,
        row=row,
        left=experts[0],
        right=experts[1],
        num_flips=sum(map(len, flipped.values())),
        num_layers=len(flipped),
        parted_at=next((one for one in before if len(_unequal_rows(left, right, one))), None),
    )


def _unequal_rows(
    left: ValueTap, right: ValueTap, point: Point, columns: slice = slice(None)
) -> Tensor:
    """Return the rows that both observed, and that differ in these columns."""
    x, y = (side.table[point][:, columns] for side in (left, right))
    both = left.observed(point) & right.observed(point)
    return (both & rows_differ(x, y)).nonzero()[:, 0]
