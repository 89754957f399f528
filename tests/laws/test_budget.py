"""Each room has a ceiling of tokens of code, and the package one of lines of tests.

`budget.json` has the ceilings. A room that shrinks lowers its own. A room that needs more adds to
`raised` by how much, and the sentence of CHANGELOG.md that says what users get for it.
"""

from __future__ import annotations

import io
import json
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.laws.source import PACKAGE, ROOT

BUDGET = ROOT / "tests/laws/budget.json"
CHANGELOG = ROOT / "CHANGELOG.md"
SLACK = 1000  # tokens that a room may lie below its ceiling
TESTS_A_LINE = 1.05  # lines of tests for a line of the package; lower it when you can
UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def num_tokens(text: str) -> int:
    """Return how many tokens of code a file has, without comments and strings in triple quotes."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        one.type not in UNCOUNTED
        and not (one.type == tokenize.STRING and one.string.startswith(('"""', "'''")))
        for one in tokens
    )


def tokens_of_rooms(package: Path) -> dict[str, int]:
    """Return the tokens of each room; files that lie in none are those of the room "top"."""
    counts: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        counts[parts[0] if len(parts) > 1 else "top"] += num_tokens(path.read_text("utf-8"))
    return dict(counts)


def ceiling(room: Mapping[str, Any]) -> int:
    return room["tokens"] + sum(one["tokens"] for one in room.get("raised", ()))


def problems(counts: Mapping[str, int], budget: Mapping[str, Any], changelog: str) -> list[str]:
    """Return what is wrong, a sentence for each room that a ceiling does not fit."""
    said = " ".join(changelog.split())
    found = [f"{room} has no ceiling" for room in sorted(counts.keys() - budget.keys())]
    found += [f"{room} is gone: take its ceiling away" for room in budget.keys() - counts.keys()]
    for room in sorted(counts.keys() & budget.keys()):
        most = ceiling(budget[room])
        if counts[room] > most:
            found.append(f"{room} has {counts[room]:,} tokens of code, its ceiling is {most:,}")
        elif counts[room] < most - SLACK:
            found.append(f"{room} has {counts[room]:,} tokens: lower its ceiling of {most:,}")
        for one in budget[room].get("raised", ()):
            if one["for"] not in said:
                found.append(f"{room}: CHANGELOG.md does not say {one['for']!r}")
    return found


def num_lines(folder: Path) -> int:
    return sum(path.read_text("utf-8").count("\n") for path in folder.rglob("*.py"))


def test_every_room_is_within_its_ceiling() -> None:
    budget = json.loads(BUDGET.read_text("utf-8"))
    assert problems(tokens_of_rooms(PACKAGE), budget, CHANGELOG.read_text("utf-8")) == []


def test_tests_have_not_many_more_lines_than_the_package() -> None:
    assert num_lines(ROOT / "tests") <= TESTS_A_LINE * num_lines(PACKAGE)


def test_rooms_above_and_far_below_their_ceilings_are_seen(tmp_path: Path) -> None:
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh/a.py").write_text('"""A docstring."""\nx = f(1)  # a comment\n')
    (tmp_path / "b.py").write_text("y = 2\n")
    counts = tokens_of_rooms(tmp_path)
    assert counts == {"mesh": 6, "top": 3}
    fits = {"mesh": {"tokens": 6}, "top": {"tokens": 3}}
    assert problems(counts, fits, "") == []
    low = fits | {"mesh": {"tokens": 5}}
    assert problems(counts, low, "") == ["mesh has 6 tokens of code, its ceiling is 5"]
    raised = fits | {"mesh": {"tokens": 5, "raised": [{"tokens": 1, "for": "Meshes of mud."}]}}
    assert problems(counts, raised, "- Meshes\n  of mud.") == []
    assert problems(counts, raised, "") == ["mesh: CHANGELOG.md does not say 'Meshes of mud.'"]
    high = fits | {"top": {"tokens": 1004}}
    assert problems(counts, high, "") == ["top has 3 tokens: lower its ceiling of 1,004"]
    assert problems(counts, {"mesh": fits["mesh"]}, "") == ["top has no ceiling"]
    gone = fits | {"attic": {"tokens": 9}}
    assert problems(counts, gone, "") == ["attic is gone: take its ceiling away"]
