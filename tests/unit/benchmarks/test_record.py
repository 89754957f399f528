"""Bars: `holds` of a row, and a script's exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import measured_code, record
from benchmarks.record import measured
from benchmarks.table import Code, Row, read_results

COMMIT = "c" * 40


@pytest.mark.parametrize(("value", "holds"), [(4.9, True), (5.0, True), (5.1, False)])
def test_a_bar_is_on_the_ratio(value: float, holds: bool) -> None:
    row = record.compared("step", value, "ms", peer="TRL", peer_value=10.0, at_most=0.5)
    assert (row.bar, row.holds) == ("<= 0.5x", holds)
    row = record.compared("rollout", value, "/s", peer="TRL", peer_value=10.0, at_least=0.505)
    assert (row.bar, row.holds) == (">= 0.505x", not holds)


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
    monkeypatch.setenv(measured_code.COMMIT_ENV, COMMIT)
    rows = [
        record.compared("step", 1 / 3, "ms", peer="TRL", peer_value=2 / 3, at_most=0.5),
        record.measured("share", 0.06, "", at_most=0.05),
    ]
    assert record.finish("benchmarks/push.py", ["msgspec"], rows, save=True) == 1
    (result,) = read_results(tmp_path)
    assert (result.script, [row.holds for row in result.rows]) == ("push.py", [True, False])
    assert "**no**" in capsys.readouterr().out
    assert record.finish("benchmarks/push.py", ["msgspec"], rows[:1], save=False) == 0
    ran = result.code.ran
    assert result.code == Code(commit=COMMIT, dirty=False, ran=ran)
    assert ran is not None and "errors.py" in ran.files.split()


def test_a_benchmark_can_be_run_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the same code and versions are kept, and others are not."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setenv(measured_code.COMMIT_ENV, COMMIT)

    def saved(*rows: Row, rooms: tuple[str, ...] = (), **versions: str) -> dict[str, float]:
        record.finish("x.py", [], list(rows), save=True, rooms=rooms, **versions)
        (result,) = read_results(tmp_path)
        assert result.code.ran is not None
        ran.append(result.code.ran.files.split())
        return {row.what: row.value for row in result.rows}

    ran: list[list[str]] = []
    assert saved(measured("a", 1, "s"), measured("b", 2, "s"), rooms=("slurm",)) == {"a": 1, "b": 2}
    assert saved(measured("b", 3, "s"), measured("c", 4, "s")) == {"a": 1, "b": 3, "c": 4}
    assert saved(measured("c", 5, "s"), gpu="another") == {"c": 5}
    assert ["slurm" in files for files in ran] == [True, True, False]
    monkeypatch.setenv(measured_code.COMMIT_ENV, f"{COMMIT}-dirty")
    assert saved(measured("a", 6, "s"), gpu="another") == {"a": 6}
    assert saved(measured("b", 7, "s"), gpu="another") == {"b": 7}


def test_without_a_commit_the_file_is_kept_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    monkeypatch.delenv(measured_code.COMMIT_ENV, raising=False)
    assert record.finish("benchmarks/push.py", ["msgspec"], [], save=True) == 0
    assert "write it into code.commit" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"code\.commit is ''"):
        read_results(tmp_path)


@pytest.mark.parametrize(("given", "dirty"), [(COMMIT, False), (f"{COMMIT}-dirty", True)])
def test_the_commit_of_a_copy(monkeypatch: pytest.MonkeyPatch, given: str, dirty: bool) -> None:
    monkeypatch.setenv(measured_code.COMMIT_ENV, given)
    code = measured_code.measured_code()
    assert (code.commit, code.dirty) == (COMMIT, dirty)


def test_the_commit_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        by = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *by, *words], cwd=tmp_path, text=True).strip()

    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    monkeypatch.delenv(measured_code.COMMIT_ENV, raising=False)
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    (tmp_path / "benchmarks/one.py").write_text("1")
    git("init", "-q")
    git("add", "--all")
    git("commit", "-qm", "one")
    (results / "of_a_run_before.json").write_text("{}")  # no part of the code
    clean = measured_code.measured_code()
    assert (clean.commit, clean.dirty) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "benchmarks/one.py").write_text("2")
    assert measured_code.measured_code().dirty is True
