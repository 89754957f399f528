"""Committed results fit the schema, and a bad file is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.table import RESULTS, read_results, table

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
    "code": {"commit": "c" * 40, "dirty": False, "kernels": "now"},
    "versions": {"torch": "2.13.0"},
    "rows": [ROW],
}


def written(tmp_path: Path, result: Any, name: str = "laptop/push.json") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(result if isinstance(result, str) else json.dumps(result))
    return tmp_path


def test_committed_results_fit() -> None:
    found = read_results(RESULTS)
    assert len(found) > 20
    assert all(re.fullmatch("[0-9a-f]{16}", one.code.kernels) for one in found)


@pytest.mark.parametrize(("kernels", "mark"), [("now", "as now"), ("new", "older")])
def test_the_table(tmp_path: Path, kernels: str, mark: str) -> None:
    text = table(read_results(written(tmp_path, RESULT)), kernels)
    assert (
        text.splitlines()[-1]
        == f"| laptop | push.py | push | 2 ms | x 4 | 0.5 | <= 1 | yes | {mark} |"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"machine": "other"}, "machine is 'other', the folder is 'laptop'"),
        ({"script": "pull.py"}, "script is 'pull.py'"),
        ({"code": {"commit": "", "dirty": None, "kernels": "now"}}, "code.commit is ''"),
        (
            {"code": {"commit": "c" * 7, "dirty": None, "kernels": "now"}},
            "code.commit is 'ccccccc'",
        ),
        ({"code": {"commit": "c" * 40, "dirty": None}}, "missing required field `kernels`"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"rows": [ROW | {"holds": None}]}, "a bar and whether it holds"),
        ({"rows": [ROW | {"holds": "yes"}]}, "Expected `bool | null`, got `str`"),
        ({"rows": [ROW | {"ratio": 2.0}]}, "the ratio is not value over peer_value"),
        ({"rows": [ROW | {"peer": None}]}, "a peer and its value"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r"laptop/push\.json") as raised:
        read_results(written(tmp_path, RESULT | change))
    assert problem in str(raised.value)
