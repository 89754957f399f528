"""Causes of failed samples: many fail for one, which is told once with their number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_TOLD = 5  # causes
# which sample it was, as `hooks/results.py` describes it
_WHICH = re.compile(
    r" on (?:evaluation )?prompt \d+ (?:sample \d+ )?\(.*?(?:['\"]|\.\.\.|samples)\): ", re.DOTALL
)
_OWN = re.compile(r"\S*\d\S*")  # a number, a random name or a time


class Cause(NamedTuple):
    """What failed samples have in common. `first` is the error of the first of them."""

    text: str
    number: int
    first: str

    def __str__(self) -> str:
        return self.first if self.number == 1 else self.text


def causes_of(errors: Iterable[str]) -> list[Cause]:
    """Return the causes of errors, the most common first. Errors that differ in the sample or in
    numbers alone have one.
    """
    causes: dict[str, Cause] = {}
    for error in errors:
        text = _WHICH.sub(": ", error, count=1)
        key = _OWN.sub("#", text)
        known = causes.get(key, Cause(text, 0, error))
        causes[key] = known._replace(number=known.number + 1)
    return sorted(causes.values(), key=lambda cause: -cause.number)


def told_causes(errors: Iterable[str]) -> Iterator[str]:
    """Yield a line for each of the most common causes, such as "4 samples: agent: it raised"."""
    causes = causes_of(errors)
    for cause in causes[:MAX_TOLD]:
        yield f"{_samples(cause.number)}: {cause}"
    if rest := causes[MAX_TOLD:]:
        number = sum(cause.number for cause in rest)
        yield f"{_samples(number)}: {len(rest)} more causes"


def _samples(number: int) -> str:
    return "a sample" if number == 1 else f"{number} samples"
