"""A row's `holds` is computed from its bar, and a script's exit code from its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.table import read_results


@pytest.mark.parametrize(("value", "holds"), [(4.9, True), (5.0, True), (5.1, False)])
def test_a_bar_is_on_the_ratio(value: float, holds: bool) -> None:
    row = record.compared("step", value, "ms", peer="TRL", peer_value=10.0, at_most=0.5)
    assert (row.bar, row.holds) == ("<= 0.5x", holds)


def test_without_a_bar_nothing_holds() -> None:
    assert record.compared("step", 1, "ms", peer="TRL", peer_value=2).holds is None
    assert record.measured("share", 0.1, "").holds is None


def test_what_is_counted() -> None:
    row = record.counted("products", [True, False, True])
    assert (row.value, row.unit, row.bar, row.holds) == (2, "of 3", "all", False)
    assert record.counted("products", [True]).holds
    assert record.counted("products", [False], all_must=False).holds is None


def test_what_is_saved_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    rows = [
        record.compared("step", 1 / 3, "ms", peer="TRL", peer_value=2 / 3, at_most=0.5),
        record.measured("share", 0.06, "", at_most=0.05),
    ]
    assert record.finish("benchmarks/push.py", ["msgspec"], rows, save=True) == 1
    (result,) = read_results(tmp_path)
    assert (result.script, [row.holds for row in result.rows]) == ("push.py", [True, False])
    assert "**no**" in capsys.readouterr().out
    assert record.finish("benchmarks/push.py", ["msgspec"], rows[:1], save=False) == 0
