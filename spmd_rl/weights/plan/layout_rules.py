"""Layouts as rules: tensors that differ only in the numbers of their names are described together.

The layers and experts of a large model are some ten kinds of tensor, 36,000 times. A rule has the
texts between the numbers of a name, and runs of values for each number. So the layouts of hundreds
of ranks are small on the wire, and a plan is made for each kind and not for each tensor (no torch).
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import msgspec

from spmd_rl.weights.plan.layout import Box, Dims, Layout, Piece

Numbers = tuple[int, ...]
Run = tuple[int, int]  # the first value, and how many follow each other from there

_NUMBER = re.compile(r"(?:(?<=\.)|^)(0|[1-9][0-9]{0,17})(?=\.|$)")


class LayoutRule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pieces of all tensors whose names have these `texts` and, between them, any combination
    of the numbers in `runs`.
    """

    texts: tuple[str, ...]
    runs: tuple[tuple[Run, ...], ...]  # for each number in the name
    shape: Dims
    dtype: str
    boxes: tuple[Box, ...]
    private: bool

    def pieces(self, name: str) -> Iterator[Piece]:
        """Yield the pieces of one of these tensors."""
        for box in self.boxes:
            yield Piece(name, self.shape, self.dtype, box, self.private)


class LayoutRules(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The layout of one rank as rules."""

    rank: int
    rules: tuple[LayoutRule, ...]


def compressed(layout: Layout) -> LayoutRules:
    """Return a layout as rules, the same ones for any order of its pieces."""
    boxes: dict[tuple[str, Dims, str, bool], set[Box]] = defaultdict(set)
    for piece in layout.pieces:
        boxes[piece.name, piece.shape, piece.dtype, piece.private].add(piece.box)
    kinds: dict[tuple[object, ...], set[Numbers]] = defaultdict(set)
    for (name, *kind), of_name in boxes.items():
        texts, numbers = split_name(name)
        kinds[texts, *kind, tuple(sorted(of_name))].add(numbers)
    rules = [
        msgspec.convert((texts, runs, shape, dtype, of_kind, private), LayoutRule)
        for (texts, shape, dtype, private, of_kind), numbers in kinds.items()
        for runs in _products(numbers)
    ]
    return LayoutRules(layout.rank, tuple(sorted(rules, key=repr)))


def expanded(rules: LayoutRules) -> Layout:
    """Return the layout that these rules describe."""
    pieces = (
        piece
        for rule in rules.rules
        for numbers in itertools.product(*map(values, rule.runs))
        for piece in rule.pieces(join_name(rule.texts, numbers))
    )
    return Layout(rules.rank, tuple(pieces))


def split_name(name: str) -> tuple[tuple[str, ...], Numbers]:
    """Return the texts of a name, and the numbers between them."""
    parts = _NUMBER.split(name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def join_name(texts: Sequence[str], numbers: Sequence[int]) -> str:
    """Invert `split_name`."""
    rest = (f"{number}{text}" for number, text in zip(numbers, texts[1:], strict=True))
    return texts[0] + "".join(rest)


def values(runs: Sequence[Run]) -> list[int]:
    """Return all values of some runs."""
    return [value for first, count in runs for value in range(first, first + count)]


def _products(rows: Collection[Numbers]) -> Iterator[tuple[tuple[Run, ...], ...]]:
    """Yield runs for each place of `rows`, which together are exactly the products of these."""
    if () in rows:
        yield ()
        return
    rests: dict[int, set[Numbers]] = defaultdict(set)
    for first, *rest in rows:
        rests[first].add(tuple(rest))
    firsts: dict[frozenset[Numbers], list[int]] = defaultdict(list)
    for first, of_first in rests.items():
        firsts[frozenset(of_first)].append(first)
    for rest_rows, same in firsts.items():
        for runs in _products(rest_rows):
            yield (_runs(same), *runs)


def _runs(numbers: Collection[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for number in sorted(numbers):
        if runs and number == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return tuple(runs)
