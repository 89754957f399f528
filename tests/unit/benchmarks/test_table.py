"""Committed results fit the schema, and a bad file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import ran_files
from benchmarks.ran_files import RanFiles
from benchmarks.table import RESULTS, read_results, stale, table

ROW = {
    "what": "push",
    "value": 2.0,
    "unit": "ms",
    "peer": "x",
    "peer_value": 4.0,
    "ratio": 0.5,
    "bar": "<= 1",
    "holds": True,
}
RESULT = {
    "script": "push.py",
    "date": "2026-11-20",
    "machine": "laptop",
    "code": {"commit": "c" * 40, "dirty": False},
    "versions": {"torch": "2.13.0"},
    "rows": [ROW],
}


def written(tmp_path: Path, result: Any, name: str = "laptop/push.json") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(result if isinstance(result, str) else json.dumps(result))
    return tmp_path


def test_committed_results_fit() -> None:
    assert len(read_results(RESULTS)) > 20


def test_the_table(tmp_path: Path) -> None:
    text = table(read_results(written(tmp_path, RESULT)))
    assert text.splitlines()[-1] == "| laptop | push.py | push | 2 ms | x 4 | 0.5 | <= 1 | yes |"


def test_a_result_is_stale_once_a_file_that_it_ran_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ran_files, "PACKAGE", tmp_path / "spmd_rl")
    for name in ("room/a.py", "room/deep/b.cu", "room/notes.txt", "other/c.py"):
        (tmp_path / "spmd_rl" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "spmd_rl" / name).write_text(name)
    ran = ran_files.joined(
        *(RanFiles(files=f, digest="") for f in ("room/a.py", "room other/c.py"))
    )
    assert ran.files == "other/c.py room"
    folder = written(tmp_path, RESULT)

    def lines(code: dict[str, Any]) -> list[str]:
        (folder / "laptop/push.json").write_text(json.dumps(RESULT | {"code": code}))
        return list(stale(read_results(folder)))

    old = {"commit": "c" * 40, "dirty": False, "kernels": "0" * 16}
    assert lines(old) == ["laptop/push of 2026-11-20: what it ran is not recorded"]
    new = {"commit": "c" * 40, "dirty": False, "ran": msgspec.to_builtins(ran)}
    assert lines(new) == []
    (tmp_path / "spmd_rl/room/notes.txt").write_text("not code")
    assert lines(new) == []
    for name, text in (("room/deep/b.cu", "faster"), ("room/a.py", ""), ("other/c.py", "slower")):
        path = tmp_path / "spmd_rl" / name
        path.write_text(text)
        assert lines(new) == ["laptop/push of 2026-11-20: files that it ran have changed"]
        path.write_text(name)
        assert lines(new) == []
    path.unlink()
    assert len(lines(new)) == 1


def test_a_ratio_of_zero_fits_a_value_of_zero(tmp_path: Path) -> None:
    row = ROW | {"value": 0.0, "ratio": 0.0}
    assert read_results(written(tmp_path, RESULT | {"rows": [row]}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"machine": "other"}, "machine is 'other', the folder is 'laptop'"),
        ({"script": "pull.py"}, "script is 'pull.py'"),
        ({"code": {"commit": "", "dirty": None}}, "code.commit is ''"),
        ({"code": {"commit": "c" * 7, "dirty": None}}, "code.commit is 'ccccccc'"),
        ({"code": {"commit": "c" * 40}}, "missing required field `dirty`"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"rows": [ROW | {"holds": None}]}, "a bar and whether it holds"),
        ({"rows": [ROW | {"holds": "yes"}]}, "Expected `bool | null`, got `str`"),
        ({"rows": [ROW | {"ratio": 2.0}]}, "the ratio is not value over peer_value"),
        ({"rows": [ROW | {"ratio": 0.0}]}, "the ratio is not value over peer_value"),
        ({"rows": [ROW | {"peer": None}]}, "a peer and its value"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r"laptop/push\.json") as raised:
        read_results(written(tmp_path, RESULT | change))
    assert problem in str(raised.value)
