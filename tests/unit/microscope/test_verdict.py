"""The sentences, from findings made by hand."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest
import torch

from spmd_rl.microscope.diagnose.compare import Comparison, LogprobPair, PointResult
from spmd_rl.microscope.diagnose.explain import Explanation, SideExplanation, VariantMatch
from spmd_rl.microscope.diagnose.kernel_names import KernelInfo
from spmd_rl.microscope.diagnose.ulp import Histogram
from spmd_rl.microscope.page.verdict import verdict
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.taps.points import BEFORE, Point

NAMES = ("engine", "trainer")
CASE = ReplayCase(
    (
        ReplaySequence("7:0", np.arange(3), np.arange(2)),
        ReplaySequence("7:1", np.arange(3), np.arange(4)),
    )
)
EQUAL, APART = Histogram((40,), 0), Histogram((37, 2, 1), 3)


def finding(
    point: Point, plain: Histogram = EQUAL, fed: Histogram = EQUAL, rows: tuple[int, ...] = ()
) -> PointResult:
    introduced = len(rows) if fed is not EQUAL else 0
    return PointResult(
        point,
        10,
        2 if plain is not EQUAL else 0,
        introduced,
        rows,
        plain,
        fed,
        0.5 if plain is APART else 0.0,
    )


def said(*findings: PointResult, cause: Explanation | None = None) -> str:
    points = tuple(one.point for one in findings)
    return verdict(Comparison(points, 100, findings, "engine"), CASE, NAMES, cause)


def test_agreement_counts_what_was_compared() -> None:
    agreed = Comparison((Point(BEFORE, "embed"), Point(0, "q")), 1234, (), "engine")
    assert (
        verdict(agreed, CASE, NAMES)
        == "engine and trainer agree in every bit: 1,234 rows at 2 points."
    )


def test_the_first_that_introduces_leads_and_the_rest_is_counted() -> None:
    sentence = said(
        finding(Point(0, "q")),
        finding(Point(1, "down_proj"), APART, APART, rows=(6, 7)),
        finding(Point(2, "attention"), APART, APART, rows=(8,)),
        finding(Point(2, "o_proj"), APART),
        finding(Point(3, "logprob"), APART),
    )
    assert sentence.startswith(
        "layer 1 down_proj: 3 of 40 outputs, in 2 of 10 rows, differ by at most 3 ULP"
    )
    assert "first at 7:1 position 1." in sentence
    assert "Introduced as well: attention (causal attention) in 1 place." in sentence
    assert "2 later points only inherit it." in sentence
    assert sentence.endswith("2 of 10 log-probs change, by 0.5 (3 ULP) at most.")


def test_both_sides_are_named_with_kernel_and_arithmetic() -> None:
    split = KernelInfo("nvjet", "tile 64x8", "K split", "wgmma")
    cause = Explanation(
        SideExplanation(
            (split,) * 6,
            (VariantMatch("one chain", 8, 0), VariantMatch("K summed in 2 parts", 2, 2)),
        ),
        SideExplanation((), (VariantMatch("one chain", 10, 2),)),
    )
    sentence = said(finding(Point(1, "down_proj"), APART, APART, rows=(6, 7)), cause=cause)
    named = "nvjet (tile 64x8, K split, wgmma)"
    assert (
        f"There the engine ran {'; '.join([named] * 4)}; 2 more: K summed in 2 parts.\n" in sentence
    )
    assert "The trainer: one chain." in sentence
    assert "Both run" not in sentence


def test_arithmetic_is_told_of_the_rows_that_differ_and_of_all_of_them() -> None:
    ways = tuple(VariantMatch(f"{n} ranges", 50, n) for n in range(1, 6))
    cause = Explanation(
        SideExplanation((), (VariantMatch("one chain", 466, 0), *ways)), SideExplanation((), ())
    )
    sentence = said(
        finding(Point(0, "attention"), APART, APART, rows=tuple(range(20))), cause=cause
    )
    assert (
        "The engine: 5 ranges in 5, 4 ranges in 4, 3 ranges in 3, "
        "others in 8 of the 20 rows that differ." in sentence
    )
    assert "The trainer: no arithmetic that was tried gives a row that differs." in sentence


def test_one_arithmetic_on_both_sides_is_the_companys_doing() -> None:
    side = SideExplanation((), (VariantMatch("one chain", 10, 2),))
    sentence = said(
        finding(Point(1, "down_proj"), APART, APART, rows=(6, 7)), cause=Explanation(side, side)
    )
    assert (
        "Both run the same arithmetic; its bits depend on which rows are computed together."
        in sentence
    )


def test_what_a_second_run_does_not_repeat_is_no_agreement() -> None:
    unequal_points = ((Point(1, "o_proj"), 64), (Point(2, "q"), 3))
    flaky = Comparison(
        (Point(1, "o_proj"),),
        100,
        (finding(Point(1, "o_proj")),),
        "engine",
        unequal_points=unequal_points,
    )
    sentence = verdict(flaky, CASE, NAMES)
    assert sentence.startswith(
        "engine and trainer parted at layer 1 o_proj, in 64 rows, but a second run did not"
    )
    assert "agree" not in sentence
    assert not flaky.agree


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ([nan, nan], [nan, -1.0], "All 2 log-probs are NaN."),
        ([nan, -1.0], [nan, -1.0], "None of 2 log-probs changes; 1 is NaN."),
    ],
)
def test_log_probs_that_are_no_numbers_are_counted(
    left: list[float], right: list[float], said: str
) -> None:
    point = Point(3, "logprob")
    found = (
        PointResult(point, 2, 0, 0, (), EQUAL, EQUAL, 0.0),
        finding(Point(1, "q"), APART, APART, rows=(6,)),
    )
    logprobs = LogprobPair(torch.arange(2), torch.tensor(left), torch.tensor(right))
    sentence = verdict(
        Comparison((point,), 100, found[::-1], "engine", logprobs=logprobs), CASE, NAMES
    )
    assert sentence.endswith(said)


def test_another_format_is_not_called_a_distance() -> None:
    same = Histogram((40,), 0)
    one = PointResult(Point(3, "logits"), 10, 10, 10, tuple(range(10)), same, same, 0.01)
    assert said(one).startswith(
        "logits: 10 of 10 rows are of another format, equal when rounded to the coarser"
    )


def test_a_difference_that_nothing_introduces_is_not_explained_away() -> None:
    assert "what was replayed is not what ran" in said(finding(Point(0, "q"), APART))


@pytest.mark.parametrize(
    ("row", "where"), [(0, ("7:0", 0)), (4, ("7:0", 4)), (5, ("7:1", 0)), (11, ("7:1", 6))]
)
def test_rows_have_names_and_positions(row: int, where: tuple[str, int]) -> None:
    assert CASE.locate(row) == where
    assert CASE.positions[row] == where[1]
