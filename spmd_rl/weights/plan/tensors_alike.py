"""Tensors that all ranks hold alike: the classes into which the rules of all layouts divide names.

All tensors of a class have the same pieces on the same ranks, so one plan serves all (no torch).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmd_rl.weights.plan.layout import Piece
from spmd_rl.weights.plan.layout_rules import LayoutRule, LayoutRules, Run, join_name, values

RankedPieces = list[tuple[int, Piece]]  # the pieces of one tensor, with their ranks
RankedRules = list[tuple[int, LayoutRule]]
Runs = tuple[Run, ...]


@dataclass(frozen=True)
class TensorsAlike:
    """Names of tensors that have the same pieces on the same ranks of both ends.

    `sources` and `wanted` are the pieces of the first, by rank and box.
    """

    names: tuple[str, ...]
    sources: RankedPieces
    wanted: RankedPieces


def tensors_alike(
    sources: Sequence[LayoutRules], destinations: Sequence[LayoutRules]
) -> list[TensorsAlike]:
    """Return all tensors of some layouts, given in the order of ranks, sorted by first name."""
    kinds: dict[tuple[str, ...], tuple[RankedRules, RankedRules]] = defaultdict(lambda: ([], []))
    for end, layouts in enumerate((sources, destinations)):
        for layout in layouts:
            for rule in layout.rules:
                kinds[rule.texts][end].append((layout.rank, rule))
    found = [alike for texts, ends in kinds.items() for alike in _of_kind(texts, *ends)]
    return sorted(found, key=lambda alike: alike.names[0])


def _of_kind(
    texts: tuple[str, ...], sources: RankedRules, wanted: RankedRules
) -> Iterator[TensorsAlike]:
    """Yield the classes of the tensors with these texts in their names."""
    rules = [rule for _, rule in (*sources, *wanted)]
    places = [
        list(_classes({rule.runs[place] for rule in rules}).items())
        for place in range(len(texts) - 1)
    ]
    for cell in itertools.product(*places):
        numbers = itertools.product(*(of_class for _, of_class in cell))
        names = tuple(join_name(texts, one) for one in numbers)
        membership = [runs for runs, _ in cell]
        ends = [
            [
                (rank, piece)
                for rank, rule in end
                if all(map(frozenset.__contains__, membership, rule.runs))
                for piece in rule.pieces(names[0])
            ]
            for end in (sources, wanted)
        ]
        if any(ends):
            yield TensorsAlike(names, *ends)


def _classes(all_runs: set[Runs]) -> dict[frozenset[Runs], list[int]]:
    """Return the numbers in these runs, divided by the runs that hold them."""
    holders: dict[int, set[Runs]] = defaultdict(set)
    for runs in all_runs:
        for value in values(runs):
            holders[value].add(runs)
    classes: dict[frozenset[Runs], list[int]] = defaultdict(list)
    for value, of_value in sorted(holders.items()):
        classes[frozenset(of_value)].append(value)
    return classes
