"""Suggestions in error messages: the key that is meant by an unknown one, and an example."""

from __future__ import annotations

import difflib
import json
import re
import typing
from dataclasses import MISSING
from itertools import accumulate
from typing import Any

from spmd_rl.config import foreign
from spmd_rl.config.describe import NAME, Key, describe
from spmd_rl.config.dump import toml_text
from spmd_rl.errors import ConfigError

# tables whose keys are also in another, which is what people mean who do not name the table
ASIDE = {"critic", "eval", "reference", "judge", "frozen"}
NEAR = 0.75  # least likeness, of 1, between the last words of two keys for one to be suggested


def nearest_key(name: str, root: type) -> str:
    """Return the end of a sentence that says which known key `name` means; empty if none does.

    What TRL, slime or verl call so goes first. Then a key is meant that ends like `name`, whose
    comment begins with the words of `name`, or whose last word is alike. Where several keys end
    like `name`, all are named, or of these only those in the table of `name`, or else the one that
    is in no table.
    """
    keys = _meant(name, describe(root))
    docs = {key.name: key.doc for key in keys}
    theirs = foreign.exact(name)
    if theirs and foreign.is_here(theirs, docs):
        return foreign.answer(theirs, docs)
    if same := _with_ending(name, list(docs)):
        *others, last = map(repr, same)
        if others:
            return f"; the nearest known keys are {', '.join(others)} and {last}"
        return f"; the nearest known key is {last}"
    if alike := foreign.by_ending(name, docs):
        return foreign.answer(alike, docs)
    nearest = _described(name, keys)
    if theirs and not nearest:
        return foreign.answer(theirs, docs)
    if nearest := nearest or _alike(name, keys):
        return f"; the nearest known key is {nearest!r}"
    alike = foreign.misspelt(name, docs)
    return foreign.answer(alike, docs) if alike else foreign.no_counterpart(name)


def refuse_foreign(name: str, root: type) -> None:
    """Raise a ConfigError if `name` is a setting of TRL, slime or verl, and none of `root`.

    It is for names in a table of ours, such as `data.train_files`: a key `data` could take it.
    """
    theirs = foreign.exact(name)
    if theirs and name not in _with_tables(keys := describe(root)):
        docs = {key.name: key.doc for key in keys}
        if foreign.is_here(theirs, docs):
            raise ConfigError(f"unknown key {name!r}{foreign.answer(theirs, docs)}")


def leaf_of(name: str, value: Any, root: type) -> str:
    """Return the name of the first value in an unknown table `name`.

    It is `name` itself where that is a table of ours, misspelt, and the value says no better.
    """
    leaf = name
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        leaf += f".{key}"
    keys = describe(root)
    docs = {key.name: key.doc for key in keys}
    is_meant = foreign.by_ending(leaf, docs) or any(_ends_alike(leaf, key) for key in docs)
    return leaf if is_meant or not _alike(name, keys) else name


def _with_ending(name: str, keys: list[str]) -> list[str]:
    """Return the keys that end like `name`, as far as what it says lets one choose."""
    same = [key for key in dict.fromkeys(keys) if _ends_alike(name, key)]
    same = same or [key for key in dict.fromkeys(keys) if _last(key) == _last(name)]
    table = name.partition(".")[0] + "."
    same = (
        [key for key in same if key.startswith(table)]
        or [key for key in same if key == _last(name)]
        or same
    )
    # sets of an evaluation have settings of other parts, and are meant only where they are named
    return [key for key in same if f".{NAME}." not in key] or same


def _alike(name: str, keys: list[Key]) -> str:
    """Return the key whose last word is most like that of `name`; "" if none is.

    Keys in the table of `name` go first.
    """
    names = _with_tables(keys)
    table = name.rpartition(".")[0] + "."
    for some in ([key for key in names if key.startswith(table)], names):
        alike = max(some, key=lambda key: _likeness(name, key), default="")
        if _likeness(name, alike)[0] >= NEAR:
            return alike
    return ""


def _described(name: str, keys: list[Key]) -> str:
    """Return the key whose comment begins with the words of `name`; "" if none does."""
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


def _ends_alike(name: str, key: str) -> bool:
    """Return whether `key` ends with all words of a `name` of several: `lora_rank`, `lora.rank`."""
    words = _words(name)
    return len(words) > 1 and _words(key)[-len(words) :] == words


def _words(name: str) -> list[str]:
    return re.split(r"[._-]", name)


def _meant(name: str, keys: list[Key]) -> list[Key]:
    """Return the keys that may be meant by `name`: those aside only if it says so, or alone."""
    aside = {key.name for key in keys if ASIDE & set(key.name.split("."))}
    plain = {_last(key.name) for key in keys if key.name not in aside}
    said = ASIDE & set(_words(name))
    return [
        key
        for key in keys
        if key.name not in aside or _last(key.name) not in plain or said & set(key.name.split("."))
    ]


def _likeness(name: str, key: str) -> tuple[float, float]:
    """Return how alike the last words are, and then the whole names."""
    last_words = difflib.SequenceMatcher(None, _last(name), _last(key)).ratio()
    if sorted(_last(name)) == sorted(_last(key)):  # letters in another order, such as `rl`
        last_words = max(last_words, NEAR)
    return last_words, difflib.SequenceMatcher(None, name, key).ratio()


def _begins_with(doc: str, last: str) -> bool:
    return doc.startswith(last.replace("_", " "))
