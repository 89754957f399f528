"""Suggestions in error messages: the key that is meant by an unknown one, and an example."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from itertools import accumulate, takewhile
from typing import Any

from spmd_rl.config import foreign
from spmd_rl.config.describe import describe
from spmd_rl.config.dump import toml_text
from spmd_rl.errors import ConfigError

# Tables whose keys are also in another, which is what people mean who do not name the table.
# Sets of an evaluation have settings of other parts.
ASIDE = {"critic", "eval", "val", "sets", "reference", "judge", "frozen"}
NEAR = 0.75  # least likeness, of 1, between the last words of two keys for one to be suggested
MISSPELT = 0.88  # and to the last word of another program's name


def nearest_key(name: str, root: type) -> str:
    """Return the end of a sentence that says which known key `name` means; empty if none does.

    What TRL, slime or verl call so goes first. Then a key is meant that ends like `name`, and then
    one whose last word is alike; at either, ours go before theirs. Ours must end with all words of
    the last part of `name`. Where several do, all are named. A key whose comment begins with these
    words goes before those that are alike.
    """
    docs = _docs(root)
    theirs, exact, spelt = foreign.here(docs), foreign.exact(name), foreign.spelt(name)
    if exact and exact.name in theirs:
        return foreign.answer(exact, docs)
    num_words = len(_words(_last(name)))
    if same := _with_ending(name, docs, num_words):
        *others, last = map(repr, same)
        if others:
            return f"; the nearest known keys are {', '.join(others)} and {last}"
        return f"; the nearest known key is {last}"
    if same := _with_ending(spelt, theirs, 1):
        return foreign.answer(theirs[same[0]], docs)
    nearest = _described(name, docs)
    if exact and not nearest:
        return foreign.answer(exact, docs)
    if nearest := nearest or _alike(name, _with_tables(docs), NEAR):
        return f"; the nearest known key is {nearest!r}"
    if nearest := _alike(spelt, theirs, MISSPELT):
        return foreign.answer(theirs[nearest], docs)
    return foreign.no_counterpart(name)


def refuse_foreign(name: str, root: type) -> None:
    """Raise a ConfigError if `name` is a setting of TRL, slime or verl, and none of `root`.

    It is for names in a table of ours, such as `data.train_files`: a key `data` could take it.
    """
    theirs = foreign.exact(name)
    if (
        theirs
        and name not in _with_tables(docs := _docs(root))
        and theirs.name in foreign.here(docs)
    ):
        raise ConfigError(f"unknown key {name!r}{foreign.answer(theirs, docs)}")


def leaf_of(name: str, value: Any, root: type) -> str:
    """Return the name of the first value in an unknown table `name`.

    It is `name` itself where that is a table of ours, misspelt, and the value says no better.
    """
    leaf = name
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        leaf += f".{key}"
    docs = _docs(root)
    known = [*docs, *foreign.here(docs)]
    is_meant = any(_common_ending(foreign.spelt(leaf), other) > 1 for other in known)
    return leaf if is_meant or not _alike(name, _with_tables(docs), NEAR) else name


def _docs(root: type) -> dict[str, str]:
    """Return the comment of each key."""
    return {key.name: key.doc for key in describe(root)}


def _with_ending(name: str, known: Iterable[str], least: int) -> list[str]:
    """Return the names that have most last words in common with `name`, and at least so many.

    Among these, those go first that are aside only as `name` says, then those in its table, then
    the one that is in no table.
    """
    table = name.partition(".")[0] + "."
    ranks = {
        other: (words, -_unsaid(name, other), other.startswith(table), other == _last(name))
        for other in known
        if (words := _common_ending(name, other)) >= least
    }
    best = max(ranks.values(), default=None)
    return [other for other, rank in ranks.items() if rank == best]


def _described(name: str, docs: Mapping[str, str]) -> str:
    """Return the key whose comment begins with the words of `name`; "" if none does."""
    words = _last(name).replace("_", " ")
    described = [key for key, doc in docs.items() if " " in words and doc.startswith(words)]
    return max(described, key=lambda key: _likeness(name, key)[1:], default="")


def _alike(name: str, known: Iterable[str], least: float) -> str:
    """Return the name whose last word is most like that of `name`; "" if none is.

    Names in the table of `name` go first.
    """
    known = [*known]
    table = name.rpartition(".")[0] + "."
    for names in ([other for other in known if other.startswith(table)], known):
        nearest = max(names, key=lambda other: _likeness(name, other), default="")
        if _likeness(name, nearest)[0] >= least:
            return nearest
    return ""


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


def _with_tables(keys: Iterable[str]) -> list[str]:
    """Return the names of keys, each after the tables that it lies in."""
    return [part for key in keys for part in accumulate(key.split("."), "{}.{}".format)]


def _words(name: str) -> list[str]:
    return re.split(r"[._-]", name)


def _common_ending(name: str, other: str) -> int:
    """Return the number of last words that two names have in common; 0 where they say too little.

    One word counts where it is all behind the last dot, and several where they are that of either.
    """
    pairs = zip(reversed(_words(name)), reversed(_words(other)), strict=False)
    num = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    least = min(len(_words(_last(name))), len(_words(_last(other))))
    counts = num >= least if num > 1 else _last(name) == _last(other)
    return num if counts else 0


def _unsaid(name: str, other: str) -> int:
    """Return how many tables that are aside `other` is in, of which `name` says nothing."""
    return len(ASIDE & set(_words(other)) - set(_words(name)))


def _likeness(name: str, other: str) -> tuple[float, int, float]:
    """Return how alike the last words are, and then the whole names."""
    last_words = difflib.SequenceMatcher(None, _last(name), _last(other)).ratio()
    if sorted(_last(name)) == sorted(_last(other)):  # letters in another order, such as `rl`
        last_words = max(last_words, NEAR)
    whole = difflib.SequenceMatcher(None, name, other).ratio()
    return last_words, -_unsaid(name, other), whole
