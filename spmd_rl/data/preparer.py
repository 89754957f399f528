"""What a recipe draws, made from the records of a data file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from spmd_rl.data.files.record import DataRecord

T = TypeVar("T")


class Preparer(ABC, Generic[T]):
    """Makes what a run draws: prompts, sequences to learn, preference pairs or documents.

    `noun` names them in messages, and `defect` says what is wrong with those that are left out.
    `answer_keys` are the keys of a record's answers.
    """

    noun: str
    defect: str = ""
    answer_keys: Sequence[str] = ()

    @abstractmethod
    def make(self, records: Sequence[DataRecord], source: str) -> list[T | None]:
        """Return one for each record of the source; None for a record that is left out.

        Raises: DataError or ConfigError, which names the first thing to correct.
        """

    @abstractmethod
    def encoded(self, prepared: T) -> bytes:
        """Return all that a run may use of it, for a digest that tells whether the data changed."""

    def notes(self) -> list[str]:
        """Return sentences on what a user may not expect of all that was made so far."""
        return []

    def report(self, records: Sequence[DataRecord], prepared: Sequence[T]) -> list[str]:
        """Return sentences on the records of a run's start, such as that answers are numbers."""
        found = []
        for key in self.answer_keys:
            if numbers := [record for record in records if record.has_number(key)]:
                found.append(
                    f"{len(numbers)} of {len(records)} answers are numbers: "
                    f"they are used as text, such as {numbers[0].text_or_number(key)!r}"
                )
        return found
