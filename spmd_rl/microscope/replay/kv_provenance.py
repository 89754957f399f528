"""Whose keys and values lie in each slot of an engine's cache: the row of the case that was
computed into it.

A sequence that finds its prompt in the cache reads what another one computed. That row stands for
its own, and has to have the same tokens up to itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spmd_rl.microscope.replay.case import Case
from spmd_rl.rollout.native.replay import ReplayStep

NOTHING = -1


class KvProvenance:
    """Follows an engine's steps. `troubles` has a sentence for each sequence that reads what is not
    its own history.
    """

    def __init__(self, case: Case, num_pages: int, page_size: int) -> None:
        self._case = case
        self._pages = np.full((num_pages, page_size), NOTHING)
        self._source = np.full(case.num_rows, NOTHING)
        self._wrong: dict[int, str] = {}

    @property
    def troubles(self) -> list[str]:
        return list(self._wrong.values())

    def step(self, step: ReplayStep, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the case that `step` computes, in its order.

        Shape: numbers [B], the sequence of each request; returns [T].
        """
        for source, target in step.copies_before:
            self._pages[target] = self._pages[source]
        computed = []
        for number, start, length, own in zip(
            numbers, step.starts, step.lengths, step.pages, strict=True
        ):
            positions = np.arange(start, start + length)
            rows = int(self._case.offsets[number]) + positions
            page, offset = np.divmod(positions, self._pages.shape[1])
            self._pages[own[page], offset] = rows
            self._source[rows] = rows
            computed.append(rows)
        for number, start, own in zip(
            numbers.tolist(), step.starts.tolist(), step.pages, strict=True
        ):
            self._read(number, start, own)
        return np.concatenate(computed)

    def shared(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows that were not computed but read, and those that they were read from."""
        rows = np.flatnonzero(
            (self._source != NOTHING) & (self._source != np.arange(len(self._source)))
        )
        return rows, self._source[rows]

    def _read(self, number: int, start: int, pages: NDArray[np.int64]) -> None:
        """Sequence `number` reads the cache up to position `start`."""
        case = self._case
        rows = int(case.offsets[number]) + np.arange(start)
        sources = self._pages[pages[: -(-start // self._pages.shape[1])]].reshape(-1)[:start]
        self._source[rows] = np.where(self._source[rows] == NOTHING, sources, self._source[rows])
        wrong = (sources == NOTHING) | (case.histories[sources] != case.histories[rows])
        if wrong.any() and number not in self._wrong:
            position = int(wrong.argmax())
            name, read = case.sequences[number].name, self._name(int(sources[position]))
            self._wrong[number] = (
                f"At position {position}, {name} reads {read} in the cache: not its own history."
            )

    def _name(self, row: int) -> str:
        return (
            "what no step wrote"
            if row == NOTHING
            else "position {1} of {0}".format(*self._case.where(row))
        )
