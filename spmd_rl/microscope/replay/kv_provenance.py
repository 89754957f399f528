"""Provenance of an engine's K/V: which row of the case was computed into each slot of the cache.

A sequence whose prompt is in the cache reads rows that another sequence computed. Such a row stands
for its own row, and must have the same tokens up to itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.rollout.native.replay import ReplayStep

UNWRITTEN = -1


class KvProvenance:
    """Follows the steps of an engine.

    `problems` has a sentence for each sequence that reads another history than its own.
    """

    def __init__(self, case: ReplayCase, num_pages: int, page_size: int) -> None:
        self._case = case
        self._pages = np.full((num_pages, page_size), UNWRITTEN)
        self._sources = np.full(case.num_rows, UNWRITTEN)
        self._problems: dict[int, str] = {}

    @property
    def problems(self) -> list[str]:
        return list(self._problems.values())

    def record_step(self, step: ReplayStep, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Record one step, and return the rows of the case that it computes, in its order.

        Shape: numbers [B], the sequence of each request; returns [T].
        """
        for source, target in step.copies_before:
            self._pages[target] = self._pages[source]
        requests = list(zip(numbers.tolist(), step.starts.tolist(), step.pages, strict=True))
        computed = [
            self._record_writes(number, start, length, pages)
            for (number, start, pages), length in zip(requests, step.lengths.tolist(), strict=True)
        ]
        for number, start, pages in requests:
            self._check_reads(number, start, pages)
        return np.concatenate(computed)

    def _record_writes(
        self, number: int, start: int, length: int, pages: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Record that `length` rows of sequence `number` are computed, and return them."""
        positions = np.arange(start, start + length)
        rows = int(self._case.offsets[number]) + positions
        page, offset = np.divmod(positions, self._pages.shape[1])
        self._pages[pages[page], offset] = rows
        self._sources[rows] = rows
        return rows

    def shared_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that were read instead of computed, and the rows that were read."""
        is_written = self._sources != UNWRITTEN
        rows = np.flatnonzero(is_written & (self._sources != np.arange(len(self._sources))))
        return rows, self._sources[rows]

    def _check_reads(self, number: int, start: int, pages: NDArray[np.int64]) -> None:
        """Check what sequence `number` reads in the cache before position `start`."""
        rows = self._case.rows(number)[:start]
        sources = self._read(pages, start)
        is_new = self._sources[rows] == UNWRITTEN
        self._sources[rows] = np.where(is_new, sources, self._sources[rows])
        wrong = self._differ(sources, rows)
        if wrong.any() and number not in self._problems:
            position = int(wrong.argmax())
            self._problems[number] = self._describe_read(number, position, int(sources[position]))

    def _read(self, pages: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return what the first `length` slots of `pages` hold."""
        num_pages = -(-length // self._pages.shape[1])
        return self._pages[pages[:num_pages]].reshape(-1)[:length]

    def _differ(self, sources: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return where a source cannot stand for its row, because it has another history."""
        histories = self._case.histories
        return (sources == UNWRITTEN) | (histories[sources] != histories[rows])

    def _describe_read(self, number: int, position: int, source: int) -> str:
        name = self._case.sequences[number].name
        return (
            f"At position {position}, {name} reads {self._describe(source)} in the cache: "
            "not its own history."
        )

    def _describe(self, row: int) -> str:
        if row == UNWRITTEN:
            return "what no step wrote"
        name, position = self._case.locate(row)
        return f"position {position} of {name}"
