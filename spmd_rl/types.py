"""The nouns that travel between controller, trainer and engine. numpy only: no torch, no tokenizer.

Shape letters used here and in docstrings elsewhere:
    N sequences of a batch, T tokens of all of them laid end to end, G samples of one prompt,
    R response tokens of one sample, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise, starmap
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

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

    def changed(self, **fields: Any) -> Sample:
        """A copy with these fields' values: `dataclasses.replace` takes five times as long."""
        return _of(Sample, self.__dict__ | fields)


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, in sample-index order; `skipped` says of those that could not be graded why."""

    prompt: Prompt
    samples: list[Sample]
    skipped: list[str] = field(default_factory=list)

    @property
    def rewards(self) -> NDArray[np.float64]:
        return np.array([sample.reward for sample in self.samples], dtype=np.float64)

    @staticmethod
    def to_columns(groups: list[Group]) -> GroupColumns:
        """How a list of groups crosses between processes.

        Raises: ContractError when the arrays of a sample differ in length.
        """
        samples = [sample for group in groups for sample in group.samples]
        lengths = [len(sample.tokens) for sample in samples]
        for sample, length in zip(samples, lengths, strict=True):
            if len(sample.logprobs) != length or len(sample.versions) != length:
                raise ContractError(f"prompt {sample.prompt_uid}, sample {sample.index}: a token without its log-prob")
        return GroupColumns(
            prompts=[group.prompt for group in groups],
            num_samples=[len(group.samples) for group in groups],
            skipped=[group.skipped for group in groups],
            prompt_uid=[sample.prompt_uid for sample in samples],
            index=[sample.index for sample in samples],
            lengths=lengths,
            tokens=_end_to_end([sample.tokens for sample in samples], np.int32),
            logprobs=_end_to_end([sample.logprobs for sample in samples], np.float32),
            versions=_end_to_end([sample.versions for sample in samples], np.int32),
            finish=[sample.finish for sample in samples],
            temperature=[sample.temperature for sample in samples],
            text=[sample.text for sample in samples],
            reward=[sample.reward for sample in samples],
            parts=[sample.parts for sample in samples],
        )


@dataclass(frozen=True)
class GroupColumns:
    """Groups as they travel: a column for each field of their samples, whose arrays lie end to end.

    `num_samples` is a number a prompt, `lengths` a number a sample.
    """

    prompts: list[Prompt]
    num_samples: list[int]
    skipped: list[list[str]]
    prompt_uid: list[int]
    index: list[int]
    lengths: list[int]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: list[FinishReason]
    temperature: list[float]
    text: list[str]
    reward: list[float]
    parts: list[dict[str, float]]

    def rows(self) -> list[Group]:
        """The groups again. Raises: ContractError when the columns do not fit each other."""
        try:
            arrays = [_pieces(column, self.lengths) for column in (self.tokens, self.logprobs, self.versions)]
            rest = (self.finish, self.temperature, self.text, self.reward, self.parts)
            rows = zip(self.prompt_uid, self.index, *arrays, *rest, strict=True)
            samples = [
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
                for uid, index, tokens, logprobs, versions, finish, temperature, text, reward, parts in rows
            ]
            parted = _pieces(samples, self.num_samples)
            groups = starmap(Group, zip(self.prompts, parted, self.skipped, strict=True))
            return list(groups)
        except ValueError as error:
            raise ContractError(f"columns of groups that do not fit each other: {error}") from error


_bare, _set = object.__new__, object.__setattr__


def _of(kind: type[T], fields: dict[str, Any]) -> T:
    """An instance with all its fields: a frozen dataclass's own `__init__` takes twice as long."""
    made = _bare(kind)
    _set(made, "__dict__", fields)
    return made


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
        lengths = self.lengths[rows].astype(np.int64)
        starts = np.cumsum(self.lengths, dtype=np.int64)[rows] - lengths
        flat = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
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


def _end_to_end(pieces: list[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


def _pieces(whole: Any, sizes: list[int]) -> list[Any]:
    """A sequence cut into pieces of these sizes. Raises: ValueError when they are not its parts."""
    ends = [0, *accumulate(sizes)]
    if ends[-1] != len(whole) or min(sizes, default=0) < 0:
        raise ValueError(f"pieces of {ends[-1]} for a whole of {len(whole)}")
    return [whole[start:end] for start, end in pairwise(ends)]
