"""Replay case: sequences whose every token is given, and a number for each of their tokens.

Shape letters: S sequences, N tokens of all of them end to end, M response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.engine import SamplingConfig


@dataclass(frozen=True)
class ReplaySequence:
    """One sequence; an engine would decode its `response` token by token.

    `drawn_as` is (uid, index) of the sample that it was, and `seed` that of its draws. Of
    `sampling`, what ends a sample does not count. `text` is the text of the prompt, `recorded` the
    log-probs that were kept with the response; either may be unknown.
    """

    name: str
    prompt: NDArray[np.integer[Any]]
    response: NDArray[np.integer[Any]]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drawn_as: tuple[int, int] | None = None
    text: str = ""
    recorded: NDArray[np.float32] | None = None
    seed: int = 0

    @property
    def temperature(self) -> float:
        """The temperature of the log-probs."""
        return self.sampling.scored_temperature

    @property
    def tokens(self) -> NDArray[np.integer[Any]]:
        return np.concatenate([self.prompt, self.response])


@dataclass(frozen=True)
class ReplayCase:
    """All sequences of a replay.

    A row is the number of a token: the offset of its sequence plus its position. `decode` turns
    tokens into text, if there is a tokenizer.
    """

    sequences: tuple[ReplaySequence, ...]
    decode: Callable[[Sequence[int]], str] | None = None

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array(
            [len(sequence.prompt) + len(sequence.response) for sequence in self.sequences]
        )

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """The position of every row in its sequence. Shape: [N]."""
        return np.arange(self.num_rows) - np.repeat(self.offsets, self.lengths)

    @cached_property
    def tokens(self) -> NDArray[np.integer[Any]]:
        """The token of every row. Shape: [N]."""
        return np.concatenate([sequence.tokens for sequence in self.sequences])

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """The token after every row; that of a sequence's last row has no meaning. Shape: [N]."""
        return np.append(self.tokens[1:], 0)

    @cached_property
    def temperatures(self) -> NDArray[np.float32]:
        """The temperature of every row's log-prob. Shape: [N]."""
        temperatures = np.array([sequence.temperature for sequence in self.sequences], np.float32)
        return np.repeat(temperatures, self.lengths)

    @cached_property
    def histories(self) -> NDArray[np.int64]:
        """A number for every row, the same for rows with the same tokens up to and with it.

        Shape: [N].
        """
        number_of: dict[tuple[int, int], int] = {}
        numbers = np.empty(self.num_rows, np.int64)
        previous = -1
        for row, (position, token) in enumerate(
            zip(self.positions.tolist(), self.tokens.tolist(), strict=True)
        ):
            history = (previous if position else -1, token)
            previous = number_of.setdefault(history, len(number_of))
            numbers[row] = previous
        return numbers

    @cached_property
    def recorded(self) -> NDArray[np.float32]:
        """The log-prob recorded with each row's next token, NaN if there is none. Shape: [N]."""
        recorded = np.full(self.num_rows, np.nan, np.float32)
        for number, sequence in enumerate(self.sequences):
            if sequence.recorded is not None:
                recorded[self.offsets[number] + self.scored_positions(number)] = sequence.recorded
        return recorded

    @property
    def num_rows(self) -> int:
        return int(self.lengths.sum())

    def rows(self, number: int) -> NDArray[np.int64]:
        """Return the rows of sequence `number`."""
        return np.arange(self.lengths[number]) + self.offsets[number]

    def scored_positions(self, number: int) -> NDArray[np.int64]:
        """Return the positions whose logits predict a response token of sequence `number`."""
        return np.arange(len(self.sequences[number].prompt) - 1, self.lengths[number] - 1)

    def sequence_number(self, row: int) -> int:
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def locate(self, row: int) -> tuple[str, int]:
        """Return the name of a row's sequence, and its position there."""
        number = self.sequence_number(row)
        return self.sequences[number].name, row - int(self.offsets[number])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, or nothing without a tokenizer."""
        return self.decode(tokens) if self.decode else ""
