"""What is asked, answered and graded: the nouns that travel between controller and engine. numpy
only.

Shape letters used here and in docstrings elsewhere: G samples of one prompt, R response tokens of
one sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ContractError
from spmd_rl.types.columns import Columns, end_to_end, pieces

T = TypeVar("T")
_Row = tuple["GroupColumns", int]  # and which of its rows

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One question, tokenised. `uid` numbers the draw, not the line: the same line drawn in two
    epochs has two uids, so that its samples use different random streams."""

    uid: int
    tokens: NDArray[np.int32]
    text: str = ""
    answer: str = ""
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def changed(self, **values: Any) -> Prompt:
        """A copy with these fields' values: `dataclasses.replace` takes five times as long."""
        return _of(Prompt, self.__dict__ | values)

    @staticmethod
    def to_columns(prompts: list[Prompt]) -> PromptColumns:
        """How a list of prompts crosses between processes."""
        return PromptColumns(
            lengths=np.array([len(prompt.tokens) for prompt in prompts], np.int64),
            uid=np.array([prompt.uid for prompt in prompts], np.int64),
            tokens=end_to_end([prompt.tokens for prompt in prompts], np.int32),
            text=[prompt.text for prompt in prompts],
            answer=[prompt.answer for prompt in prompts],
            source=[prompt.source for prompt in prompts],
            meta=[prompt.meta for prompt in prompts],
        )


@dataclass(frozen=True)
class Sample:
    """One answer to one prompt.

    Shape: `tokens`, `logprobs`, `versions` are [R]; `logprobs` are the engine's, at decode time, at
    the sampling temperature, over the unmasked vocabulary; `versions` names the weights that made
    each token.
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

    def changed(self, **values: Any) -> Sample:
        """A copy with these fields' values, as `Prompt.changed`."""
        return _of(Sample, self.__dict__ | values)

    @staticmethod
    def to_columns(samples: list[Sample]) -> SampleColumns:
        """How a list of samples crosses between processes.

        Raises: ContractError when the arrays of a sample differ in length.
        """
        lengths = [len(sample.tokens) for sample in samples]
        for sample, length in zip(samples, lengths, strict=True):
            if len(sample.logprobs) != length or len(sample.versions) != length:
                raise ContractError(
                    f"prompt {sample.prompt_uid}, sample {sample.index}: a token without its log-prob"
                )
        return SampleColumns(
            lengths=np.array(lengths, np.int64),
            prompt_uid=np.array([sample.prompt_uid for sample in samples], np.int64),
            index=np.array([sample.index for sample in samples], np.int64),
            tokens=end_to_end([sample.tokens for sample in samples], np.int32),
            logprobs=end_to_end([sample.logprobs for sample in samples], np.float32),
            versions=end_to_end([sample.versions for sample in samples], np.int32),
            finish=[sample.finish for sample in samples],
            temperature=np.array([sample.temperature for sample in samples], np.float64),
            text=[sample.text for sample in samples],
            reward=np.array([sample.reward for sample in samples], np.float64),
            parts=[sample.parts for sample in samples],
        )


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, in sample-index order; `skipped` says of those that could not be
    graded why.

    `graded_s` is how long its rank spent in the reward function, for all groups of the call that
    this one is from. A group from another process is a row of the columns it came in: its fields
    are made when somebody looks at one.
    """

    prompt: Prompt
    samples: list[Sample]
    skipped: list[str] = field(default_factory=list)
    graded_s: float = 0.0

    if TYPE_CHECKING:
        _row: ClassVar[_Row | None]  # of a group that nobody has looked into
        # of one that somebody has: its row, and samples then
        _before: ClassVar[tuple[_Row, list[Sample]] | None]
    else:
        _row = _before = None  # annotated, they would cross between processes as fields do

        def __getattr__(self, name: str) -> Any:
            if self._row is None:
                raise AttributeError(f"a Group has no {name}")
            columns, number = row = self.__dict__.pop("_row")
            prompt, samples, skipped, graded_s = columns.groups[number]
            looked = {
                "prompt": prompt,
                "samples": samples.copy(),
                "skipped": skipped,
                "graded_s": graded_s,
            }
            self.__dict__.update(looked, _before=(row, samples))
            return getattr(self, name)

    @property
    def num_samples(self) -> int:
        return len(self.samples) if self._row is None else int(self._row[0].lengths[self._row[1]])

    @property
    def rewards(self) -> NDArray[np.float64]:
        if self._row is None:
            return np.array([sample.reward for sample in self.samples], np.float64)
        columns, number = self._row
        return columns.samples.reward[columns.ends[number] : columns.ends[number + 1]].copy()

    @staticmethod
    def to_columns(groups: Sequence[Group]) -> GroupColumns:
        """How groups cross between processes, and are reckoned with: the columns that they came in,
        or new ones.

        Raises: ContractError when the arrays of a sample differ in length.
        """
        rows = [row for group in groups if (row := group._row or group._row_before())]
        if not groups or len(rows) < len(groups):
            return GroupColumns(
                lengths=np.array([len(group.samples) for group in groups], np.int64),
                prompts=Prompt.to_columns([group.prompt for group in groups]),
                samples=Sample.to_columns([sample for group in groups for sample in group.samples]),
                skipped=[group.skipped for group in groups],
                graded_s=np.array([group.graded_s for group in groups], np.float64),
            )
        runs: list[list[Any]] = []
        for columns, number in rows:
            if runs and runs[-1][0] is columns and runs[-1][2] == number:
                runs[-1][2] = number + 1
            else:
                runs.append([columns, number, number + 1])
        whole = GroupColumns.join([columns[start:stop] for columns, start, stop in runs])
        if len(runs) > 1:  # whoever asks next has them as they are now
            for number, group in enumerate(groups):
                if group._row:
                    group.__dict__["_row"] = (whole, number)
        return whole

    def _row_before(self) -> _Row | None:
        """The row that the group was, if its samples are the same still."""
        row, samples = self._before or (None, [])
        return (
            row
            if len(samples) == len(self.samples) and all(map(is_, samples, self.samples))
            else None
        )


@dataclass(frozen=True)
class PromptColumns(Columns):
    """Prompts as they travel; `lengths` counts tokens."""

    END_TO_END = ("tokens",)

    uid: NDArray[np.int64]
    tokens: NDArray[np.int32]
    text: list[str]
    answer: list[str]
    source: list[str]
    meta: list[dict[str, Any]]

    def rows(self) -> list[Prompt]:
        """The prompts again. Raises: ValueError when the columns do not fit each other."""
        self.check()
        tokens = pieces(self.tokens, self.ends)
        return list(
            map(Prompt, self.uid.tolist(), tokens, self.text, self.answer, self.source, self.meta)
        )


@dataclass(frozen=True)
class SampleColumns(Columns):
    """Samples as they travel; `lengths` counts tokens."""

    END_TO_END = ("tokens", "logprobs", "versions")

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

    def rows(self) -> list[Sample]:
        """The samples again. Raises: ValueError when the columns do not fit each other."""
        self.check()
        numbers = [
            column.tolist()
            for column in (self.prompt_uid, self.index, self.temperature, self.reward)
        ]
        arrays = [
            pieces(column, self.ends) for column in (self.tokens, self.logprobs, self.versions)
        ]
        return [
            _of(
                Sample,
                {
                    "prompt_uid": uid,
                    "index": index,
                    "tokens": tokens,
                    "logprobs": logprobs,
                    "versions": versions,
                    "finish": finish,
                    "temperature": temperature,
                    "text": text,
                    "reward": reward,
                    "parts": parts,
                },
            )
            for uid, index, temperature, reward, tokens, logprobs, versions, finish, text, parts in zip(
                *numbers, *arrays, self.finish, self.text, self.parts, strict=True
            )
        ]


@dataclass(frozen=True)
class GroupColumns(Columns):
    """Groups as they travel; `lengths` counts samples."""

    END_TO_END = ("samples",)

    prompts: PromptColumns
    samples: SampleColumns
    skipped: list[list[str]]
    graded_s: NDArray[np.float64]

    def rows(self) -> list[Group]:
        """The groups again. Raises: ContractError when the columns do not fit each other."""
        try:
            for columns in (self, self.prompts, self.samples):
                columns.check()
        except ValueError as error:
            raise ContractError(f"columns of groups that do not fit each other: {error}") from error
        return [_of(Group, {"_row": (self, number)}) for number in range(len(self))]

    @cached_property
    def groups(self) -> list[tuple[Prompt, list[Sample], list[str], float]]:
        """The fields of every group, made when somebody looks into the first."""
        samples = pieces(self.samples.rows(), self.ends)
        return list(
            zip(self.prompts.rows(), samples, self.skipped, self.graded_s.tolist(), strict=True)
        )


_bare, _set = object.__new__, object.__setattr__


def _of(kind: type[T], values: dict[str, Any]) -> T:
    """An instance with all its fields: a frozen dataclass's own `__init__` takes twice as long."""
    made = _bare(kind)
    _set(made, "__dict__", values)
    return made
