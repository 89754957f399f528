"""Settings of a recipe as lines of a terminal: the first ones shortly, or all of them in full."""

from __future__ import annotations

import re
from collections.abc import Iterable

from spmd_rl.config.describe import Key, describe
from spmd_rl.config.first import first_groups

PAGE = "docs/settings.md"
WIDTH = 100
NAMES_WIDTH = 38  # of a name and its default; a longer one moves its meaning to the right
TOP_LEVEL = "settings of the recipe"
CUT = " ..."
_CLAUSE_END = re.compile(r"; |: | \(")


def first_lines(config: type) -> list[str]:
    """Return the settings that people change first, each on one line, and where the others are."""
    groups = first_groups(config)
    lines = [
        line for title, keys in groups.items() for line in _block(title, map(short_line, keys))
    ]
    num_others = len({key.name for key in describe(config)}) - sum(map(len, groups.values()))
    others = (
        f"the other {num_others} settings too" if num_others else "these settings with their types"
    )
    return [*lines, "", f"--help-all lists {others}; those of shipped recipes are in {PAGE}."]


def all_lines(config: type, top: str = TOP_LEVEL) -> list[str]:
    """Return all settings with their types: those of the top level, then table by table.

    `top` is the title of the first.
    """
    tables: dict[str, list[Key]] = {top: []}
    for key in describe(config):
        table, dot, _ = key.name.partition(".")
        tables.setdefault(table if dot else top, []).append(key)
    return [
        line
        for title, keys in tables.items()
        if keys
        for line in _block(title, map(long_line, keys))
    ]


def short_line(key: Key) -> str:
    """Return name, default and the first words of a setting's comment, in `WIDTH` columns."""
    start = f"  --{key.name}={key.default}".ljust(NAMES_WIDTH)
    return f"{start}  {shortened(key.doc, WIDTH - len(start) - 2)}".rstrip()[:WIDTH]


def long_line(key: Key) -> str:
    """Return name, default, type and comment of a setting."""
    return f"  --{key.name}={key.default}  ({key.type})  {key.doc}".rstrip()


def shortened(text: str, room: int) -> str:
    """Return a text that has room: as many of its clauses as fit, else of its words."""
    if len(text) <= room:
        return text
    ends = [found.start() for found in _CLAUSE_END.finditer(text) if found.start() <= room]
    clauses = [text[:end] for end in ends if text[end] != ":" or ";" not in text[:end]]
    if clauses and " " in clauses[-1]:
        return clauses[-1]
    words = text[: max(room - len(CUT) + 1, 0)].rpartition(" ")[0]
    return f"{words}{CUT}" if words else ""


def _block(title: str, lines: Iterable[str]) -> list[str]:
    return ["", f"{title}:", *lines]
