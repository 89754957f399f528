"""What is replayed: sequences whose every token is known, and a number for each of their tokens.

Shape letters: S sequences, N tokens of all of them end to end, M response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.engine import SamplingConfig


@dataclass(frozen=True)
class Replayed:
    """One sequence; `response` is what an engine would decode token by token, drawn as sample
    `drawn_as` (uid, index).

    Its draws had `seed`. Of `sampling`, what ends a sample does not count. `text` is what its first tokens were made of,
    `recorded` the log-probs that were kept with the response; either may be unknown.
    """

    name: str
    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drawn_as: tuple[int, int] | None = None
    text: str = ""
    recorded: NDArray[np.float32] | None = None
    seed: int = 0

    @property
    def temperature(self) -> float:
        """Of the log-probs."""
        return self.sampling.scored_temperature

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.concatenate([self.prompt, self.response])


@dataclass(frozen=True)
class Case:
    """All sequences of a replay. A row is a token's number: its sequence's offset plus its
    position.

    `decode` gives the text of tokens, where there is a tokenizer.
    """

    sequences: tuple[Replayed, ...]
    decode: Callable[[Sequence[int]], str] | None = None

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

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """Of every row. Shape: [N]."""
        return np.concatenate([one.tokens for one in self.sequences])

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """The token after every row's; a sequence's last row has one without a meaning. Shape: [N]."""
        return np.append(self.tokens[1:], 0)

    @cached_property
    def temperatures(self) -> NDArray[np.float32]:
        """Of every row's log-prob. Shape: [N]."""
        return np.repeat(
            np.array([one.temperature for one in self.sequences], np.float32), self.lengths
        )

    @cached_property
    def histories(self) -> NDArray[np.int64]:
        """A number for every row, the same for rows with the same tokens up to themselves. Shape:
        [N].
        """
        known: dict[tuple[int, int], int] = {}
        numbers = np.empty(self.num_rows, np.int64)
        before = -1
        for row, (position, token) in enumerate(
            zip(self.positions.tolist(), self.tokens.tolist(), strict=True)
        ):
            before = known.setdefault((before if position else -1, token), len(known))
            numbers[row] = before
        return numbers

    @cached_property
    def recorded(self) -> NDArray[np.float32]:
        """The log-prob that was kept with each row's next token, NaN where none was. Shape: [N]."""
        kept = np.full(self.num_rows, np.nan, np.float32)
        for number, one in enumerate(self.sequences):
            if one.recorded is not None:
                kept[self.offsets[number] + self.scored(number)] = one.recorded
        return kept

    @property
    def num_rows(self) -> int:
        return int(self.lengths.sum())

    def scored(self, number: int) -> NDArray[np.int64]:
        """Positions whose logits predict a response token of sequence `number`."""
        return np.arange(len(self.sequences[number].prompt) - 1, self.lengths[number] - 1)

    def number(self, row: int) -> int:
        """Of a row's sequence."""
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def where(self, row: int) -> tuple[str, int]:
        """Name and position of a row."""
        number = self.number(row)
        return self.sequences[number].name, row - int(self.offsets[number])

    def text(self, tokens: Sequence[int]) -> str:
        """Empty without a tokenizer."""
        return self.decode(tokens) if self.decode else ""
