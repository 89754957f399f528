"""Suggestions in error messages: the known key that a misspelt one resembles, and an example."""

from __future__ import annotations

import difflib
import json
import typing
from dataclasses import MISSING
from itertools import accumulate
from typing import Any

from spmd_rl.config.describe import NAME, Key, describe
from spmd_rl.config.dump import toml_text

NEAR = 0.75  # least likeness, of 1, between the last words of two keys for one to be suggested


def nearest_key(name: str, root: type) -> str:
    """Return the end of a sentence that names the known key nearest to `name`; empty if none is.

    A key is near if its last word is alike, or if its comment begins with the words of `name`.
    Keys with the very same last word are all named, or of these only those in the table of `name`,
    or else the one that is in no table.
    """
    last, keys = _last(name), describe(root)
    same = list(dict.fromkeys(key.name for key in keys if _last(key.name) == last))
    table = name.partition(".")[0] + "."
    same = (
        [key for key in same if key.startswith(table)]
        or [key for key in same if key == last]
        or same
    )
    # sets of an evaluation have settings of other parts, and are meant only where they are named
    same = [key for key in same if f".{NAME}." not in key] or same
    if len(same) > 1:
        names = ", ".join(repr(key) for key in same[:-1])
        return f"; the nearest known keys are {names} and {same[-1]!r}"
    nearest = same[0] if same else _nearest(name, keys)
    return f"; the nearest known key is {nearest!r}" if nearest else ""


def _nearest(name: str, keys: list[Key]) -> str:
    """Return the key nearest to `name`, by its own name or else by its comment; "" if none is."""
    alike = max(_with_tables(keys), key=lambda key: _likeness(name, key), default="")
    if _likeness(name, alike)[0] >= NEAR:
        return alike
    last = _last(name)
    described = [key.name for key in keys if "_" in last and _begins_with(key.doc, last)]
    return max(described, key=lambda key: _likeness(name, key)[1], default="")


def example(value: Any, hint: Any, base: Any) -> str:
    """Return how to write a list or a table on a command line; empty for another type.

    `value` is what was given instead, and `base` the key's default.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and isinstance(value, str):
        return _table_example(args[1])
    if origin not in (list, tuple) or isinstance(value, list):
        return ""
    if isinstance(value, str) and args[0] is str:
        return f" such as '{json.dumps([value.strip('[]')])}'"
    return f" such as {toml_text(list(base))}" if base and base is not MISSING else ""


def _table_example(hint: Any) -> str:
    item = {str: "text", int: 1, float: 0.5}.get(hint, True)
    return f" such as '{json.dumps({'name': item})}'"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _with_tables(keys: list[Key]) -> list[str]:
    """Return the names of keys, each after the tables that it lies in."""
    return [part for key in keys for part in accumulate(key.name.split("."), "{}.{}".format)]


def _likeness(name: str, key: str) -> tuple[float, float]:
    """Return how alike the last words are, and then the whole names."""
    last_words = difflib.SequenceMatcher(None, _last(name), _last(key)).ratio()
    return last_words, difflib.SequenceMatcher(None, name, key).ratio()


def _begins_with(doc: str, last: str) -> bool:
    return doc.startswith(last.replace("_", " "))
