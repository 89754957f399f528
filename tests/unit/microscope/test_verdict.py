"""The sentences, from findings made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.microscope.case import Case, Replayed
from spmd_rl.microscope.compare import Comparison, Finding
from spmd_rl.microscope.explain import Match
from spmd_rl.microscope.identity import Kernel
from spmd_rl.microscope.points import BEFORE, Point
from spmd_rl.microscope.ulp import Histogram
from spmd_rl.microscope.verdict import Cause, Side, verdict

NAMES = ("engine", "trainer")
CASE = Case((Replayed("7:0", np.arange(3), np.arange(2)), Replayed("7:1", np.arange(3), np.arange(4))))
EQUAL, APART = Histogram((40,), 0), Histogram((37, 2, 1), 3)


def finding(point: Point, plain: Histogram = EQUAL, fed: Histogram = EQUAL, rows: tuple[int, ...] = ()) -> Finding:
    introduced = len(rows) if fed is not EQUAL else 0
    return Finding(
        point, 10, 2 if plain is not EQUAL else 0, introduced, rows, plain, fed, 0.5 if plain is APART else 0.0
    )


def said(*findings: Finding, cause: Cause | None = None) -> str:
    points = tuple(one.point for one in findings)
    return verdict(Comparison(points, 100, findings, "engine"), CASE, NAMES, cause)


def test_agreement_counts_what_was_compared() -> None:
    agreed = Comparison((Point(BEFORE, "embed"), Point(0, "q")), 1234, (), "engine")
    assert verdict(agreed, CASE, NAMES) == "engine and trainer agree in every bit: 1,234 rows at 2 points."


def test_the_first_that_introduces_leads_and_the_rest_is_counted() -> None:
    sentence = said(
        finding(Point(0, "q")),
        finding(Point(1, "down_proj"), APART, APART, rows=(6, 7)),
        finding(Point(2, "attention"), APART, APART, rows=(8,)),
        finding(Point(2, "o_proj"), APART),
        finding(Point(3, "logprob"), APART),
    )
    assert sentence.startswith("layer 1 down_proj: 3 of 40 outputs, in 2 of 10 rows, differ by at most 3 ULP")
    assert "first at 7:1 position 1." in sentence
    assert "Introduced as well: attention (causal attention) in 1 place." in sentence
    assert "2 later points only inherit it." in sentence
    assert sentence.endswith("2 of 10 log-probs change, by 0.5 (3 ULP) at most.")


def test_both_sides_are_named_with_kernel_and_arithmetic() -> None:
    split = Kernel("nvjet", "tile 64x8", "K split", "wgmma")
    cause = Cause(
        Side((split,), (Match("K summed in 2 parts", 8), Match("one chain", 2))), Side((), (Match("one chain", 10),))
    )
    sentence = said(finding(Point(1, "down_proj"), APART, APART, rows=(6,)), cause=cause)
    assert "The engine ran nvjet (tile 64x8, K split, wgmma): K summed in 2 parts in 8 of 10 rows" in sentence
    assert "The trainer: one chain." in sentence


def test_another_format_is_not_called_a_distance() -> None:
    same = Histogram((40,), 0)
    one = Finding(Point(3, "logits"), 10, 10, 10, tuple(range(10)), same, same, 0.01)
    assert said(one).startswith("logits: 10 of 10 rows are of another format, equal when rounded to the coarser")


def test_a_difference_that_nothing_introduces_is_not_explained_away() -> None:
    assert "what was replayed is not what ran" in said(finding(Point(0, "q"), APART))


@pytest.mark.parametrize(("row", "where"), [(0, ("7:0", 0)), (4, ("7:0", 4)), (5, ("7:1", 0)), (11, ("7:1", 6))])
def test_rows_have_names_and_positions(row: int, where: tuple[str, int]) -> None:
    assert CASE.where(row) == where
    assert CASE.positions[row] == where[1]
