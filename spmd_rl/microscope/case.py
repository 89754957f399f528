"""What is replayed: sequences whose every token is known, and a number for each of their tokens.

Shape letters: S sequences, N tokens of all of them end to end, M response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Replayed:
    """One sequence; `response` is what an engine would decode token by token."""

    name: str
    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    temperature: float = 1.0

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.concatenate([self.prompt, self.response])


@dataclass(frozen=True)
class Case:
    """All sequences of a replay. A row is a token's number: its sequence's offset plus its position."""

    sequences: tuple[Replayed, ...]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(one.prompt) + len(one.response) for one in self.sequences])

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Of every row in its sequence. Shape: [N]."""
        return np.arange(self.num_rows) - np.repeat(self.offsets, self.lengths)

    @property
    def num_rows(self) -> int:
        return int(self.lengths.sum())

    def scored(self, number: int) -> NDArray[np.int64]:
        """Positions whose logits predict a response token of sequence `number`."""
        return np.arange(len(self.sequences[number].prompt) - 1, self.lengths[number] - 1)

    def where(self, row: int) -> tuple[str, int]:
        """Name and position of a row."""
        number = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return self.sequences[number].name, row - int(self.offsets[number])
