"""The nouns that travel between controller, trainer and engine. numpy only: no torch, no tokenizer.

Shape letters used here and in docstrings elsewhere:
    N sequences of a batch, T tokens of all of them laid end to end, G samples of one prompt,
    R response tokens of one sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.columns import Columns, end_to_end, pieces, places
from spmd_rl.errors import ContractError
from spmd_rl.partition import balanced

T = TypeVar("T")

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One question, tokenised. `uid` numbers the draw, not the line: the same line drawn in two epochs has
    two uids, so that its samples use different random streams."""

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
            uid=[prompt.uid for prompt in prompts],
            tokens=end_to_end([prompt.tokens for prompt in prompts], np.int32),
            text=[prompt.text for prompt in prompts],
            answer=[prompt.answer for prompt in prompts],
            source=[prompt.source for prompt in prompts],
            meta=[prompt.meta for prompt in prompts],
        )


@dataclass(frozen=True)
class Sample:
    """One answer to one prompt.

    Shape: `tokens`, `logprobs`, `versions` are [R]; `logprobs` are the engine's, at decode time, at the
    sampling temperature, over the unmasked vocabulary; `versions` names the weights that made each token.
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
                raise ContractError(f"prompt {sample.prompt_uid}, sample {sample.index}: a token without its log-prob")
        return SampleColumns(
            lengths=np.array(lengths, np.int64),
            prompt_uid=[sample.prompt_uid for sample in samples],
            index=[sample.index for sample in samples],
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
    """All samples of one prompt, in sample-index order; `skipped` says of those that could not be graded why.

    A group from another process is a row of the columns that came. Its fields are cut from them when somebody asks for
    one, and are what counts from then on, since lists may be changed.
    """

    prompt: Prompt
    samples: list[Sample]
    skipped: list[str] = field(default_factory=list)

    _row: ClassVar[tuple[GroupColumns, int] | None] = None  # of a group that nobody has looked into

    if not TYPE_CHECKING:  # to the type checker there are just the fields

        def __getattr__(self, name: str) -> Any:
            if self._row is None:
                raise AttributeError(f"a Group has no {name}")
            columns, row = self.__dict__.pop("_row")
            self.__dict__.update(columns.groups[row])
            return getattr(self, name)

    @property
    def num_samples(self) -> int:
        return len(self.samples) if self._row is None else int(self._row[0].lengths[self._row[1]])

    @property
    def rewards(self) -> NDArray[np.float64]:
        if self._row is None:
            return np.array([sample.reward for sample in self.samples], dtype=np.float64)
        columns, row = self._row
        return columns.samples.reward[columns.ends[row] : columns.ends[row + 1]].copy()

    @staticmethod
    def to_columns(groups: Sequence[Group]) -> GroupColumns:
        """How groups cross between processes, and are reckoned with: the columns that they came in, or new ones.

        Raises: ContractError when the arrays of a sample differ in length.
        """
        rows = [group._row for group in groups if group._row is not None]
        if not groups or len(rows) < len(groups):
            return GroupColumns(
                lengths=np.array([len(group.samples) for group in groups], np.int64),
                prompts=Prompt.to_columns([group.prompt for group in groups]),
                samples=Sample.to_columns([sample for group in groups for sample in group.samples]),
                skipped=[group.skipped for group in groups],
            )
        runs: list[list[Any]] = []
        for columns, row in rows:
            if runs and runs[-1][0] is columns and runs[-1][2] == row:
                runs[-1][2] = row + 1
            else:
                runs.append([columns, row, row + 1])
        whole = GroupColumns.join([columns[start:stop] for columns, start, stop in runs])
        for row, group in enumerate(groups):
            group.__dict__["_row"] = (whole, row)  # whoever asks next has them at once
        return whole


@dataclass(frozen=True)
class PromptColumns(Columns):
    """Prompts as they travel; `lengths` counts tokens."""

    END_TO_END = ("tokens",)

    uid: list[int]
    tokens: NDArray[np.int32]
    text: list[str]
    answer: list[str]
    source: list[str]
    meta: list[dict[str, Any]]

    def rows(self) -> list[Prompt]:
        """The prompts again. Raises: ValueError when the columns do not fit each other."""
        self.check()
        tokens = pieces(self.tokens, self.ends.tolist())
        return _rows(Prompt, self.uid, tokens, self.text, self.answer, self.source, self.meta)


@dataclass(frozen=True)
class SampleColumns(Columns):
    """Samples as they travel; `lengths` counts tokens."""

    END_TO_END = ("tokens", "logprobs", "versions")

    prompt_uid: list[int]
    index: list[int]
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
        ends = self.ends.tolist()
        arrays = [pieces(array, ends) for array in (self.tokens, self.logprobs, self.versions)]
        rest = (self.finish, self.temperature.tolist(), self.text, self.reward.tolist(), self.parts)
        return _rows(Sample, self.prompt_uid, self.index, *arrays, *rest)


@dataclass(frozen=True)
class GroupColumns(Columns):
    """Groups as they travel; `lengths` counts samples."""

    END_TO_END = ("samples",)

    prompts: PromptColumns
    samples: SampleColumns
    skipped: list[list[str]]

    def rows(self) -> list[Group]:
        """The groups again. Raises: ContractError when the columns do not fit each other."""
        try:
            self.check()
        except ValueError as error:
            raise ContractError(f"columns of groups that do not fit each other: {error}") from error
        return [_of(Group, {"_row": (self, row)}) for row in range(len(self))]

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """The fields of every group, made when somebody looks into the first."""
        samples = pieces(self.samples.rows(), self.ends.tolist())
        rows = zip(self.prompts.rows(), samples, self.skipped, strict=True)
        return [{"prompt": prompt, "samples": own, "skipped": skipped} for prompt, own, skipped in rows]


_bare, _set = object.__new__, object.__setattr__


def _of(kind: type[T], values: dict[str, Any]) -> T:
    """An instance with all its fields: a frozen dataclass's own `__init__` takes twice as long."""
    made = _bare(kind)
    _set(made, "__dict__", values)
    return made


def _rows(kind: Any, *columns: Sequence[Any]) -> list[Any]:
    """An instance for each row of columns in the order of its fields."""
    names = [entry.name for entry in fields(kind)]
    return [_of(kind, dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Batch:
    """Sequences ready to train on, laid end to end.

    Shape: `tokens`, `mask`, `weight`, `advantages`, `roll_logprobs`, `versions` are [T]; `lengths`, `temperature`,
    `index` are [N].
    Entry t of the per-token arrays speaks of token t (predicted from the tokens before it in its sequence);
    the first token of a sequence is never in the mask.
    `weight` and `denominator`: the loss is sum(weight * per-token loss) / denominator. Both are fixed for the whole
    batch before it is split over ranks and micro-batches, so that the loss does not depend on either.
    `versions`: the weights that made each token, -1 where no engine did.
    `index`: the sequence's place in the batch before any split.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    mask: NDArray[np.bool_]
    weight: NDArray[np.float32]
    advantages: NDArray[np.float32]
    roll_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: NDArray[np.float32]
    index: NDArray[np.int32]
    denominator: float

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def take(self, indices: list[int] | NDArray[np.intp]) -> Batch:
        """The sequences `indices`, in that order, with the same denominator."""
        rows = np.asarray(indices, dtype=np.int64)
        flat = places(self.lengths, rows)
        return Batch(
            tokens=self.tokens[flat],
            lengths=self.lengths[rows],
            mask=self.mask[flat],
            weight=self.weight[flat],
            advantages=self.advantages[flat],
            roll_logprobs=self.roll_logprobs[flat],
            versions=self.versions[flat],
            temperature=self.temperature[rows],
            index=self.index[rows],
            denominator=self.denominator,
        )

    def shard(self, num_shards: int) -> list[Batch]:
        """The batch in `num_shards` parts of nearly equal token count; a part may have no sequence."""
        return [self.take(part) for part in balanced(self.lengths.tolist(), num_shards)]
