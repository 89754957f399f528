"""docs/architecture.md has every room, on the floor that the law on imports gives it."""

from __future__ import annotations

import re

from tests.laws.source import PACKAGE, ROOT
from tests.laws.test_floors import FLOORS

PAGE = ROOT / "docs/architecture.md"
_FLOOR = re.compile(r"^\| (\d) \| ((?:`[\w.]+` ?)+)\|$", re.MULTILINE)
_ROOM = re.compile(r"^\| `(\w+)/` \|", re.MULTILINE)
NO_ROOMS = {"", "__main__"}


def floors(page: str) -> dict[int, set[str]]:
    """Return the rooms of each floor, as the page's first table has them; 1 is the lowest."""
    return {
        int(number): {name.removesuffix(".py") for name in re.findall(r"`([\w.]+)`", rooms)}
        for number, rooms in _FLOOR.findall(page)
    }


def described(page: str) -> set[str]:
    """Return the rooms that have a row of their own."""
    return set(_ROOM.findall(page))


def test_floors_are_those_of_the_law() -> None:
    expected = {height: floor - NO_ROOMS for height, floor in enumerate(FLOORS, start=1)}
    assert floors(PAGE.read_text(encoding="utf-8")) == expected


def test_every_folder_is_described() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert described(PAGE.read_text(encoding="utf-8")) == folders


def test_what_the_page_says_is_read() -> None:
    page = "| 2 | `mesh` `errors.py` |\n| 1 | `types` |\n| `mesh/` | Ranks. | |\n"
    assert floors(page) == {2: {"mesh", "errors"}, 1: {"types"}}
    assert described(page) == {"mesh"}
