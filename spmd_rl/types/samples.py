"""Samples: the responses to prompts. numpy only.

Shape letters used here and in docstrings elsewhere: G samples of one prompt, R response tokens of
one sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from spmd_rl.errors import ContractError
from spmd_rl.types.columns import Columns, concatenate, split_at
from spmd_rl.types.prompts import construct
from spmd_rl.types.token_data import NO_TOKENS, TokenData
from spmd_rl.types.token_data import NO_VERSION as NO_VERSION

# how a sample ended: by a stop, at a length limit, before its end, or by an error of a hook
SampleStatus = Literal["completed", "truncated", "aborted", "failed"]

FAILURE = "failure"  # key of a failed sample's `metadata`: what failed (hooks/failures.py)
ERROR = "error"  # key of `metadata`: why a sample failed, or why its reward is 0 without a grader
FAULT = "fault"  # key of `metadata`: why a client may not go on from the last reply (gateway/)
GIVEN = "given"  # key of `metadata`: the reward and its parts that an episode gave, for graders
# keys of `metadata` that an environment sets: the agent whose sample it is, and a record of each of
# its turns, with "state", "reward", "first_token" and "num_tokens"
AGENT, TURN_RECORDS = "agent", "turns"
MODEL, TURNS = "assistant", "messages"  # the role of what the policy drew; a key of `metadata`


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

    `mask` marks the tokens that the policy drew and learns from. If it is not given, these are all
    tokens with a version. `columns` are further values of each token by name, which an engine
    returned (`token_data.py`). Tokens of an observation, such as the result of a tool, have a
    log-prob of 0, the version -1, an empty kept set and zeros in `columns`.

    `context` holds the tokens before the first of `tokens`, where they are not those of the prompt,
    as in the conversation of a sub-agent. It is empty where they are. `prompt_routes` are the
    experts of the tokens before, where the engine recorded them (`token_data.py`).

    `metadata` is plain data: "error" says why a sample failed, or why its agent's error is a reward
    of 0, "failure" what failed, "given" is the reward that its episode gave, "metrics" is
    what hooks emitted, "notes" is what they noted, "messages" are the turns of an episode, and
    "times" of a group's first sample are those of its request (`observe/request_times.py`).

    Shape: `tokens`, `logprobs`, `versions`, `mask` are [R]; `columns` are [R] or [R, K]; `context`
    is [C].
    """

    prompt_uid: int
    index: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    status: SampleStatus
    temperature: float = 1.0
    text: str = ""
    reward: float = float("nan")
    parts: dict[str, float] = field(default_factory=dict)
    execution: int = -1
    kept: bytes = b""
    mask: NDArray[np.bool_] = None  # type: ignore[assignment]  # see __post_init__
    metadata: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    context: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    prompt_routes: bytes = b""

    def __post_init__(self) -> None:
        if self.__dict__["mask"] is None:
            object.__setattr__(self, "mask", self.versions != NO_VERSION)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns that follow the prompt, each with its "role" and "content".

        The role of what the model said is "assistant". Without an episode it is one turn.
        """
        return self.metadata.get(TURNS) or [{"role": MODEL, "content": self.text}]

    @property
    def answer(self) -> str:
        """What the model said last, without what tools said before or after it."""
        said = [turn.get("content") for turn in self.messages if turn.get("role") == MODEL]
        return said[-1] if said and isinstance(said[-1], str) else ""

    @property
    def data(self) -> TokenData:
        """All that is known of each token, but for the mask."""
        given = {name: getattr(self, name) for name in TokenData.__struct_fields__}
        return TokenData(**given)

    def with_data(self, data: TokenData, **values: Any) -> Sample:
        """Return a copy with other tokens and these fields changed. The mask is made anew."""
        given = {name: getattr(data, name) for name in TokenData.__struct_fields__}
        return self.replace(**given | {"mask": data.versions != NO_VERSION} | values)

    def replace(self, **values: Any) -> Sample:
        """Return a copy with these fields changed, like `Prompt.replace`."""
        return construct(Sample, self.__dict__ | values)

    @staticmethod
    def to_columns(samples: list[Sample]) -> SampleColumns:
        """Return the columns in which a list of samples crosses between processes.

        Raises: ContractError when the arrays of a sample differ in length.
        """
        by_name = {name: [getattr(one, name) for one in samples] for name in _FIELDS}
        lengths = _check_lengths(samples, *(by_name[name] for name in _TOKEN_DTYPES))
        columns: dict[str, Any] = by_name | {
            name: concatenate(by_name[name], dtype) for name, dtype in _TOKEN_DTYPES.items()
        }
        if np.array_equal(columns["mask"], columns["versions"] != NO_VERSION):
            columns["mask"] = np.zeros(0, np.bool_)
        for name, dtype in _NUMBER_DTYPES.items():
            columns[name] = np.array(by_name[name], dtype)
        for name in _BYTES:
            blobs = [np.frombuffer(one, np.uint8) for one in by_name[name]]
            columns[name] = blobs if any(map(len, blobs)) else []
        columns["metadata"] = by_name["metadata"] if any(by_name["metadata"]) else []
        columns["columns"] = _joined_columns(samples) if any(by_name["columns"]) else {}
        columns["context"] = by_name["context"] if any(map(len, by_name["context"])) else []
        return SampleColumns(lengths=np.array(lengths, np.int64), **columns)


_FIELDS = tuple(one.name for one in fields(Sample))
_TOKEN_DTYPES: dict[str, DTypeLike] = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "mask": np.bool_,
}
_BYTES = ("kept", "prompt_routes")
_NUMBER_DTYPES: dict[str, DTypeLike] = {
    "prompt_uid": np.int64,
    "index": np.int64,
    "temperature": np.float64,
    "reward": np.float64,
    "execution": np.int64,
}


def _joined_columns(samples: list[Sample]) -> dict[str, NDArray[Any]]:
    """Return the columns of all samples. Raises: ContractError where they do not fit."""
    for one in samples:
        if bad := [name for name, rows in one.columns.items() if len(rows) != len(one.tokens)]:
            where = f"prompt {one.prompt_uid}, sample {one.index}"
            raise ContractError(f"{where}: the column {bad[0]!r} needs a row for each token")
    try:
        return TokenData.join([one.data for one in samples]).columns
    except ValueError as error:
        raise ContractError(f"samples do not fit each other: {error}") from error


def error_of(failed: Sample) -> str:
    """Return why a sample failed."""
    return str(failed.metadata.get(ERROR, "no reason is given"))


def _check_lengths(samples: list[Sample], *arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return the lengths of the samples. Raises: ContractError where their arrays differ in it."""
    lengths, *others = ([*map(len, own)] for own in arrays)
    if any(other != lengths for other in others):
        rows = zip(samples, lengths, *others, strict=True)
        bad = next(sample for sample, length, *more in rows if set(more) != {length})
        raise ContractError(
            f"prompt {bad.prompt_uid}, sample {bad.index}: every token needs one log-prob, one "
            "version and one entry of the mask"
        )
    return lengths


@dataclass(frozen=True)
class SampleColumns(Columns):
    """Samples in columns; `lengths` counts tokens. `kept`, `context` and `prompt_routes` are arrays
    of each sample, which travel as raw bytes.
    """

    RAGGED = ("tokens", "logprobs", "versions", "mask", "columns")
    OPTIONAL = ("kept", "mask", "metadata", "context", "prompt_routes")

    prompt_uid: NDArray[np.int64]
    index: NDArray[np.int64]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    status: list[SampleStatus]
    temperature: NDArray[np.float64]
    text: list[str]
    reward: NDArray[np.float64]
    parts: list[dict[str, float]]
    execution: NDArray[np.int64]
    kept: list[NDArray[np.uint8]]
    mask: NDArray[np.bool_]
    metadata: list[dict[str, Any]]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    context: list[NDArray[np.int32]] = field(default_factory=list)
    prompt_routes: list[NDArray[np.uint8]] = field(default_factory=list)

    def default(self, name: str) -> Any:
        match name:
            case "mask":
                return self.versions != NO_VERSION
            case "context":
                return [NO_TOKENS] * len(self)
            case "kept" | "prompt_routes":
                return [np.zeros(0, np.uint8)] * len(self)
        return [{} for _ in range(len(self))]

    def rows(self) -> list[Sample]:
        """Return the samples as objects. Raises: ValueError, as `check` does."""
        self.check()
        values = zip(*map(self._by_row, _FIELDS), strict=True)
        return [construct(Sample, dict(zip(_FIELDS, row, strict=True))) for row in values]

    def _by_row(self, name: str) -> list[Any]:
        """Return what each sample has in the field `name`."""
        column = self.filled(name)
        if isinstance(column, dict):
            parts = {key: split_at(values, self.offsets) for key, values in column.items()}
            return [{key: parts[key][row] for key in parts} for row in range(len(self))]
        if name in _BYTES:
            return [blob.tobytes() for blob in column]
        if isinstance(column, list):
            return column
        values: list[Any] = (
            split_at(column, self.offsets) if name in self.RAGGED else column.tolist()
        )
        return values
