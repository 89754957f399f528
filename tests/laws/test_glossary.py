"""docs/glossary.md is short, in order, and points at files that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.laws.source import PACKAGE, ROOT

PAGE = ROOT / "docs/glossary.md"
MAX_TERMS = 40
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_PLACE = re.compile(r"`([\w/]+\.py)`|\]\(([\w/.-]+)\)")


class Term(NamedTuple):
    """One row of the glossary."""

    name: str
    meaning: str
    places: list[str]


def terms(page: str) -> list[Term]:
    rows = _ROW.findall(page)[2:]  # without the head and the rule below it
    return [
        Term(name, meaning, [module or link for module, link in _PLACE.findall(where)])
        for name, meaning, where in rows
    ]


def problems(term: Term) -> Iterator[str]:
    """Everything that is wrong with a row."""
    if not term.meaning.endswith(".") or ". " in term.meaning:
        yield f"{term.name}: its meaning is one sentence"
    if not term.places:
        yield f"{term.name}: names no file or page"
    for place in term.places:
        folder = PACKAGE if place.endswith(".py") else PAGE.parent
        if not (folder / place).exists():
            yield f"{term.name}: there is no {place}"


def test_every_term_has_a_sentence_and_a_place() -> None:
    found = terms(PAGE.read_text(encoding="utf-8"))
    assert 30 < len(found) <= MAX_TERMS
    assert [problem for term in found for problem in problems(term)] == []


def test_terms_are_in_order() -> None:
    names = [term.name.lower() for term in terms(PAGE.read_text(encoding="utf-8"))]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ("| rank | A process. | `mesh/world.py` |", 0),
        ("| rank | A process. | [resume](resume.md) |", 0),
        ("| rank | A process. Not a thread. | `mesh/world.py` |", 1),
        ("| rank | A process. | the mesh |", 1),
        ("| rank | A process. | `mesh/no_such.py` |", 1),
    ],
)
def test_a_wrong_row_is_seen(row: str, count: int) -> None:
    (term,) = terms(f"| term | meaning | where |\n| --- | --- | --- |\n{row}\n")
    assert len([*problems(term)]) == count
