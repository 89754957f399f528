"""Transcript of an episode: what the engine drew, and what the episode observed, after a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import NO_TOKENS, TokenData

TurnStatus = Literal["completed", "truncated"]
END_OF_IDS = 1 << 31


class TurnLimits(msgspec.Struct, frozen=True, array_like=True):
    """What ends one turn. None leaves what the recipe's sampling says; `stop_ids` are more ids
    besides those of the recipe and of the model.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_ids: tuple[int, ...] = ()


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What one engine call drew: `status` is "completed" after a stop, "truncated" at a limit.

    Shape: `tokens`, `logprobs`, `versions` are [R].
    """

    data: TokenData
    text: str = ""
    status: TurnStatus = "completed"

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self.data.tokens

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return self.data.logprobs

    @property
    def versions(self) -> NDArray[np.int32]:
        return self.data.versions


class TranscriptPlace(NamedTuple):
    """Place of a transcript in its episode: its number, the index of its sample, and the
    temperature of its log-probs.
    """

    number: int
    sample_index: int
    temperature: float


class Transcript:
    """A prompt and all that follows it: tokens that the engine drew, and tokens that were observed.

    Tokens are only ever appended, and text is never tokenised again. An episode that needs another
    past, such as that of a sub-agent, makes another transcript. `context` are token ids that it
    begins with, in place of the prompt's own.
    Raises: ValueError for a context of no tokens, or of what are no token ids.
    """

    def __init__(
        self, prompt: Prompt, context: Sequence[int] | NDArray[np.integer] | None = None
    ) -> None:
        self.prompt = prompt
        self.context = prompt.tokens if context is None else _token_ids("context", context)
        if context is not None and not len(self.context):
            raise ValueError("context: expected at least one token id")
        self.place: TranscriptPlace | None = (
            None  # the engine's first call for this transcript gives it one
        )
        self._parts: list[TokenData] = []  # observed tokens too
        self._status: TurnStatus | None = None  # of the last turn

    @property
    def num_tokens(self) -> int:
        """The number of tokens, those of the context included."""
        return len(self.context) + sum(map(len, self._parts))

    def observe(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append tokens that the policy did not draw, such as the result of a tool.

        Nothing learns from them: their log-prob is 0 and their version -1.
        Raises: ValueError for what are no token ids.
        """
        ids = _token_ids("observe", tokens)
        if len(ids):
            self._parts.append(TokenData.observed(ids))

    def append(self, turn: Turn) -> None:
        """Append what the engine drew. `EpisodeEngine.complete` does this."""
        self._parts.append(turn.data)
        self._status = turn.status

    @property
    def data(self) -> TokenData:
        """All that follows the context."""
        return TokenData.join(self._parts)

    def sample(self, status: TurnStatus | None = None) -> Sample:
        """Return the transcript as a sample. Without `status` it has that of the last turn.

        Raises: ValueError before the first turn.
        """
        if self.place is None or self._status is None:
            raise ValueError("sample: the engine has drawn nothing in this transcript yet")
        data, (_, index, temperature) = self.data, self.place
        return Sample(
            self.prompt.uid,
            index,
            data.tokens,
            data.logprobs,
            data.versions,
            status or self._status,
            temperature,
            kept=data.kept,
            columns=data.columns,
            context=NO_TOKENS if self.context is self.prompt.tokens else self.context,
            prompt_routes=data.prompt_routes,
        )


def _token_ids(what: str, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """Raises: ValueError for what are no token ids."""
    ids = np.asarray(tokens)
    if len(ids) == 0:
        return NO_TOKENS
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= END_OF_IDS:
        raise ValueError(f"{what}: expected token ids, such as await engine.encode(text)")
    return ids.astype(np.int32)
