"""Prompts of one data file by their numbers: all held in memory, or read when they are asked for.

Of a small file, everything is tokenised at the start, so that every mistake in it is found there.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import compress

import numpy as np

from spmd_rl.data.files import open_records
from spmd_rl.data.prompt_format import (
    Tokenizer,
    is_too_long,
    report_dropped,
    report_numeric_answers,
)
from spmd_rl.data.prompt_records import PromptConfig, make_prompts
from spmd_rl.data.record import DataRecord, Records
from spmd_rl.errors import DataError
from spmd_rl.types.prompts import Prompt

# A file with more bytes or records is large: it is read when prompts are drawn.
SMALL_BYTES, SMALL_RECORDS = 1 << 24, 100_000
FIRST = 1000  # prompts of a large file that are checked at the start

Make = Callable[[Sequence[DataRecord]], list[Prompt]]


class PromptStore(ABC):
    """Prompts of a file, by their numbers. `num_dropped` counts those found to be too long.

    `lengths` are those of the prompts that were tokenised at the start.
    """

    lengths: Sequence[int]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Return these prompts. None stands for one that is too long."""

    @property
    @abstractmethod
    def num_dropped(self) -> int: ...

    @property
    @abstractmethod
    def digest(self) -> str: ...


def open_prompts(path: str, cfg: PromptConfig, tokenizer: Tokenizer, source: str) -> PromptStore:
    """Open a file, and tokenise its prompts, or the first ones of a large file.

    Raises: DataError or ConfigError, which names the first thing to correct.
    """

    def make(records: Sequence[DataRecord]) -> list[Prompt]:
        return make_prompts(records, cfg, tokenizer, source)

    records = open_records(path)
    is_small = records.num_bytes <= SMALL_BYTES and len(records) <= SMALL_RECORDS
    first = records.read(range(len(records) if is_small else min(len(records), FIRST)))
    prompts = make(first)
    report_numeric_answers(path, cfg.answer_key, first)
    if is_small:
        return HeldPrompts(path, cfg, first, prompts)
    return ReadPrompts(path, cfg, records, make, prompts)


class HeldPrompts(PromptStore):
    """Prompts that are all in memory, but for those that are too long."""

    def __init__(
        self,
        path: str,
        cfg: PromptConfig,
        records: Sequence[DataRecord],
        prompts: Sequence[Prompt],
    ) -> None:
        fits = [not is_too_long(cfg, len(prompt.tokens)) for prompt in prompts]
        self._prompts = [*compress(prompts, fits)]
        self._num_dropped = len(records) - len(self._prompts)
        self.lengths = [len(prompt.tokens) for prompt in self._prompts]
        report_dropped(path, cfg, self._num_dropped, len(records))

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Return these prompts."""
        return [self._prompts[number] for number in numbers]

    @property
    def num_dropped(self) -> int:
        """How many prompts of the file are too long."""
        return self._num_dropped

    @cached_property
    def digest(self) -> str:
        """Digest of all fields of the prompts: a corrected answer, for one, changes rewards."""
        return _digest(self._prompts)


class ReadPrompts(PromptStore):
    """Prompts that are read and tokenised when they are asked for. `first` are the first ones."""

    def __init__(
        self,
        path: str,
        cfg: PromptConfig,
        records: Records,
        make: Make,
        first: Sequence[Prompt],
    ) -> None:
        self._path, self._cfg, self._records, self._make = path, cfg, records, make
        self._of_first = _digest(first)
        lengths = [len(prompt.tokens) for prompt in first]
        self.lengths = [length for length in lengths if not is_too_long(cfg, length)]
        self._too_long = np.zeros(len(records), np.bool_)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Return these prompts. None stands for one that is too long.

        Raises: DataError for a record that is malformed, and when all prompts are too long.
        """
        prompts = self._make(self._records.read(numbers))
        fits = [not is_too_long(self._cfg, len(prompt.tokens)) for prompt in prompts]
        if not all(fits):
            self._note_too_long([n for n, fit in zip(numbers, fits, strict=True) if not fit])
        return [prompt if fit else None for prompt, fit in zip(prompts, fits, strict=True)]

    @property
    def num_dropped(self) -> int:
        """How many prompts were found to be too long so far."""
        return int(np.count_nonzero(self._too_long))

    @cached_property
    def digest(self) -> str:
        """Digest of the file, and of the first prompts, which change with tokenizer and keys."""
        return hashlib.sha256(f"{self._records.digest()} {self._of_first}".encode()).hexdigest()

    def _note_too_long(self, numbers: Sequence[int]) -> None:
        limit = self._cfg.max_prompt_tokens
        if not self.num_dropped:
            print(
                f"{self._path}: prompts with more than {limit} tokens are dropped "
                "when they are drawn",
                flush=True,
            )
        self._too_long[numbers] = True
        if self._too_long.all():
            raise DataError(self._path, f"all {len(self)} prompts are longer than {limit} tokens")


def _digest(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        fields = [prompt.text, prompt.answer, prompt.meta]
        texts = json.dumps(
            [*fields, prompt.reward] if prompt.reward else fields, sort_keys=True, default=repr
        ).encode()
        for part in (prompt.tokens.tobytes(), texts):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
