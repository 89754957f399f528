"""Samples, and groups of samples of one prompt. numpy only.

Shape letters used here and in docstrings elsewhere: G samples of one prompt, R response tokens of
one sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ContractError
from spmd_rl.types.columns import Columns, concatenate, split_at
from spmd_rl.types.prompts import Prompt, PromptColumns, construct

_Row = tuple["GroupColumns", int]  # columns and a row of them

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sample:
    """One response to one prompt.

    `logprobs` are those of the engine at decode time, at the sampling temperature. `kept` holds the
    tokens from which each token was drawn, where top-k, top-p or min-p left out others
    (`kept_sets.py`); `logprobs` are then those over these tokens. It is empty where nothing was
    filtered, or the engine returns no sets. `versions` holds the version of the weights that drew
    each token. `parts` holds all values of a reward function that returns a dict. Samples of one
    prompt that come from one run of it share its `execution`; -1 says that the sample is a run of
    its own.

    Shape: `tokens`, `logprobs`, `versions` are [R].
    """

    prompt_uid: int
    index: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: FinishReason
    temperature: float = 1.0
    text: str = ""
    reward: float = float("nan")
    parts: dict[str, float] = field(default_factory=dict)
    execution: int = -1
    kept: bytes = b""

    def replace(self, **values: Any) -> Sample:
        """Return a copy with these fields changed, like `Prompt.replace`."""
        return construct(Sample, self.__dict__ | values)

    @staticmethod
    def to_columns(samples: list[Sample]) -> SampleColumns:
        """Return the columns in which a list of samples crosses between processes.

        Raises: ContractError when the arrays of a sample differ in length.
        """
        lengths = [len(sample.tokens) for sample in samples]
        for sample, length in zip(samples, lengths, strict=True):
            if len(sample.logprobs) != length or len(sample.versions) != length:
                raise ContractError(
                    f"prompt {sample.prompt_uid}, sample {sample.index}: "
                    "every token needs one log-prob and one version"
                )
        return SampleColumns(
            lengths=np.array(lengths, np.int64),
            prompt_uid=np.array([sample.prompt_uid for sample in samples], np.int64),
            index=np.array([sample.index for sample in samples], np.int64),
            tokens=concatenate([sample.tokens for sample in samples], np.int32),
            logprobs=concatenate([sample.logprobs for sample in samples], np.float32),
            versions=concatenate([sample.versions for sample in samples], np.int32),
            finish=[sample.finish for sample in samples],
            temperature=np.array([sample.temperature for sample in samples], np.float64),
            text=[sample.text for sample in samples],
            reward=np.array([sample.reward for sample in samples], np.float64),
            parts=[sample.parts for sample in samples],
            execution=np.array([sample.execution for sample in samples], np.int64),
            kept=[np.frombuffer(sample.kept, np.uint8) for sample in samples],
        )


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, in the order of their index.

    `skipped` holds, for each sample that could not be graded, the reason. `reward_time_s` is how
    long the reward functions took for this group.

    A group from another process is only a row of columns at first. Its fields are made when one of
    them is first read.
    """

    prompt: Prompt
    samples: list[Sample]
    skipped: list[str] = field(default_factory=list)
    reward_time_s: float = 0.0

    if TYPE_CHECKING:
        _row: ClassVar[_Row | None]  # while the fields are not made
        # once they are: the row, and the samples that were made from it
        _source: ClassVar[tuple[_Row, list[Sample]] | None]
    else:
        _row = _source = (
            None  # with annotations they would be fields, which cross between processes
        )

        def __getattr__(self, name: str) -> Any:
            if self._row is None:
                raise AttributeError(f"a Group has no {name}")
            columns, number = row = self.__dict__.pop("_row")
            prompt, samples, skipped, reward_time_s = columns.groups[number]
            self.__dict__.update(
                prompt=prompt,
                samples=samples.copy(),
                skipped=skipped,
                reward_time_s=reward_time_s,
                _source=(row, samples),
            )
            return getattr(self, name)

    @property
    def num_samples(self) -> int:
        return len(self.samples) if self._row is None else int(self._row[0].lengths[self._row[1]])

    @property
    def rewards(self) -> NDArray[np.float64]:
        if self._row is None:
            return np.array([sample.reward for sample in self.samples], np.float64)
        columns, number = self._row
        return columns.samples.reward[columns.offsets[number] : columns.offsets[number + 1]].copy()

    @staticmethod
    def to_columns(groups: Sequence[Group]) -> GroupColumns:
        """Return the columns of groups, in which they cross between processes and are computed on.

        Groups that came in columns, and were not changed since, keep those columns.
        Raises: ContractError when the arrays of a sample differ in length.
        """
        rows = [row for group in groups if (row := group._row or group._unchanged_row())]
        if not groups or len(rows) < len(groups):
            return _new_columns(groups)
        runs = _consecutive_rows(rows)
        joined = GroupColumns.join([columns[start:stop] for columns, start, stop in runs])
        if len(runs) > 1:  # the next call need not join them again
            for number, group in enumerate(groups):
                if group._row:
                    group.__dict__["_row"] = (joined, number)
        return joined

    def _unchanged_row(self) -> _Row | None:
        """Return the row that the fields were made from, if the samples are still the same."""
        row, samples = self._source or (None, [])
        if len(samples) != len(self.samples) or not all(map(is_, samples, self.samples)):
            return None
        return row


def _new_columns(groups: Sequence[Group]) -> GroupColumns:
    """Return columns made from the fields of the groups."""
    return GroupColumns(
        lengths=np.array([len(group.samples) for group in groups], np.int64),
        prompts=Prompt.to_columns([group.prompt for group in groups]),
        samples=Sample.to_columns([sample for group in groups for sample in group.samples]),
        skipped=[group.skipped for group in groups],
        reward_time_s=np.array([group.reward_time_s for group in groups], np.float64),
    )


def _consecutive_rows(rows: list[_Row]) -> list[tuple[GroupColumns, int, int]]:
    """Return (columns, start, stop) of each run of neighbouring rows."""
    runs: list[tuple[GroupColumns, int, int]] = []
    for columns, number in rows:
        if runs and runs[-1][0] is columns and runs[-1][2] == number:
            runs[-1] = (columns, runs[-1][1], number + 1)
        else:
            runs.append((columns, number, number + 1))
    return runs


@dataclass(frozen=True)
class SampleColumns(Columns):
    """Samples in columns; `lengths` counts tokens. `kept` are arrays, which travel as raw bytes."""

    RAGGED = ("tokens", "logprobs", "versions")

    prompt_uid: NDArray[np.int64]
    index: NDArray[np.int64]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: list[FinishReason]
    temperature: NDArray[np.float64]
    text: list[str]
    reward: NDArray[np.float64]
    parts: list[dict[str, float]]
    execution: NDArray[np.int64]
    kept: list[NDArray[np.uint8]]

    def rows(self) -> list[Sample]:
        """Return the samples as objects. Raises: ValueError, as `check` does."""
        self.check()
        columns = zip(
            self.prompt_uid.tolist(),
            self.index.tolist(),
            split_at(self.tokens, self.offsets),
            split_at(self.logprobs, self.offsets),
            split_at(self.versions, self.offsets),
            self.finish,
            self.temperature.tolist(),
            self.text,
            self.reward.tolist(),
            self.parts,
            self.execution.tolist(),
            self.kept,
            strict=True,
        )
        return [
            construct(
                Sample,
                {
                    "prompt_uid": prompt_uid,
                    "index": index,
                    "tokens": tokens,
                    "logprobs": logprobs,
                    "versions": versions,
                    "finish": finish,
                    "temperature": temperature,
                    "text": text,
                    "reward": reward,
                    "parts": parts,
                    "execution": execution,
                    "kept": kept.tobytes(),
                },
            )
            for (
                prompt_uid,
                index,
                tokens,
                logprobs,
                versions,
                finish,
                temperature,
                text,
                reward,
                parts,
                execution,
                kept,
            ) in columns
        ]


@dataclass(frozen=True)
class GroupColumns(Columns):
    """Groups in columns; `lengths` counts samples."""

    RAGGED = ("samples",)

    prompts: PromptColumns
    samples: SampleColumns
    skipped: list[list[str]]
    reward_time_s: NDArray[np.float64]

    def rows(self) -> list[Group]:
        """Return groups that read these columns. Raises: ContractError when the columns differ
        in length.
        """
        try:
            for columns in (self, self.prompts, self.samples):
                columns.check()
        except ValueError as error:
            raise ContractError(f"the columns of groups do not fit each other: {error}") from error
        return [construct(Group, {"_row": (self, number)}) for number in range(len(self))]

    @cached_property
    def groups(self) -> list[tuple[Prompt, list[Sample], list[str], float]]:
        """The fields of every group, made when a field of any group is first read."""
        samples = split_at(self.samples.rows(), self.offsets)
        return list(
            zip(
                self.prompts.rows(), samples, self.skipped, self.reward_time_s.tolist(), strict=True
            )
        )
