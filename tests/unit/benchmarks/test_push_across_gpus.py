"""The rows of push_across_gpus.py, computed from times that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.push_across_gpus import rates, rows_of
from benchmarks.push_across_recipe import TURNS, WARM_UPS, Measured, Push, Received
from benchmarks.table import Row

GB = 10**9


def measured(transfer_s: float, pause_s: float) -> Measured:
    """Return a run of two sources and two engines, which each get 10 GB at 100 GB/s. Warm-ups, and
    one of the two engines, have other times.
    """
    fast = Received(transfer_s / 2, pause_s / 2, 5)
    slow = Received(transfer_s, pause_s, 5)
    pushes = [Push(9.0, 7, [Received(9.0, 9.0, 9)] * 2)] * WARM_UPS
    pushes += [Push(0.25, 0, [fast, slow])] * TURNS
    plain = [[9.0, 9.0]] * WARM_UPS + [[0.01, 0.04]] * TURNS  # 2 senders, twice a GB each: 4 GB
    return Measured(2, 2, 2, 10 * GB, 0, 2, pushes, {GB: plain})


def the(rows: list[Row], name: str) -> Row:
    return next(row for row in rows if row.what == f"x: {name}")


def test_the_rate_of_send_and_receive_is_that_of_the_slowest_rank() -> None:
    assert rates(measured(0.1, 0.1)) == {GB: pytest.approx(100 * GB)}


@pytest.mark.parametrize(
    ("transfer_s", "pause_s", "holds"),
    [(0.12, 0.119, (True, True)), (0.126, 0.119, (False, True)), (0.12, 0.121, (True, False))],
)
def test_bars_of_ranks_apart(transfer_s: float, pause_s: float, holds: tuple[bool, bool]) -> None:
    rows = list(rows_of("x", measured(transfer_s, pause_s), with_bars=True))
    rate, pause = the(rows, "rate of a push"), the(rows, "pause of generation")
    assert (rate.holds, pause.holds) == holds
    assert (rate.peer_value, pause.peer_value) == (100, 100)
    assert the(rows, "the controller's round trip").value == 250
    assert the(rows, "sent by a source's rank").value == 10
    assert the(rows, "compared tensors, all equal").value == 7


@pytest.mark.parametrize(("pause_s", "holds"), [(0.399, True), (0.401, False)])
def test_bar_of_ranks_that_have_both_roles(pause_s: float, holds: bool) -> None:
    gathers = [[9.0, 9.0]] * WARM_UPS + [[0.1, 0.2]] * TURNS
    found = replace(measured(0.3, pause_s), gathers=gathers)
    rows = list(rows_of("x", found, with_bars=True))
    assert the(rows, "pause of generation").holds is holds
    assert the(rows, "rate of a push").holds is None
    assert the(rows, "all-gather, received by a rank").value == 50


def test_there_are_no_bars_on_times_without_gpus() -> None:
    rows = list(rows_of("x", measured(9.0, 9.0), with_bars=False))
    assert {row.what for row in rows if row.bar} == {"x: compared tensors, all equal"}
