"""CHANGELOG.md sends readers to modules and public names that exist."""

from __future__ import annotations

import re

import spmd_rl
from tests.laws.source import PACKAGE, ROOT

PAGE = ROOT / "CHANGELOG.md"
_MOVE = re.compile(r"^\| (`[^|]*) \| ([^|]*) \|$", re.MULTILINE)
_NAME = re.compile(r"`([\w.]+?)(?:\.\*)?`")


def new_names(page: str) -> list[str]:
    """Return the names of the right column; `.b` after `a.c` stands for `a.b`."""
    names: list[str] = []
    for _, cell in _MOVE.findall(page):
        for name in _NAME.findall(cell):
            parent = names[-1].rpartition(".")[0] if name.startswith(".") else ""
            names.append(parent + name)
    return names


def exists(name: str) -> bool:
    if name.startswith("rl."):
        return name.removeprefix("rl.") in spmd_rl.__all__
    path = PACKAGE / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_new_name_exists() -> None:
    names = [name for name in new_names(PAGE.read_text(encoding="utf-8")) if "role." not in name]
    assert len(names) > 40
    assert [name for name in names if not exists(name)] == []


def test_a_wrong_name_is_seen() -> None:
    page = (
        "| `a` | `types.batch`, `.columns` |\n| `b` | `rl.Batch` |\n| `c` | `kernels.linear.*` |\n"
    )
    assert all(map(exists, new_names(page)))
    assert new_names(page)[1] == "types.columns"
    assert not any(map(exists, ("types.no_such", "rl.no_such")))
