"""What a client asks for and what it gets, in one form for all dialects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.messages import Message
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.follow_template import TemplateExtras
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.types.kept_sets import decode_sets
from spmd_rl.types.token_data import TokenData

Finish = Literal["stop", "length", "tool_calls"]


class Refused(SpmdError):
    """A request that is not answered. `field` names what it is about, "" the request as a whole.

    `status` is the status of HTTP, and `retry_after_s` says when to ask again. `allowed` are the
    methods that the path takes, where this is what was wrong.
    """

    def __init__(
        self,
        field: str,
        problem: str,
        *,
        status: int = 400,
        code: str = "",
        retry_after_s: int = 0,
        allowed: tuple[str, ...] = (),
    ) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field, self.problem, self.status, self.code = field, problem, status, code
        self.retry_after_s, self.allowed = retry_after_s, allowed

    def inside(self, outer: str) -> Refused:
        """Return the same for a field that is part of another one."""
        return Refused(f"{outer}.{self.field}", self.problem, status=self.status, code=self.code)


@dataclass(frozen=True)
class SamplingRules:
    """Sampling of the recipe, of which every log-prob is. None: not known.

    `stop_ids` end a turn besides the end-of-text ids. With `free`, clients choose their own
    sampling and seeds, as nothing learns from what they draw.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_ids: tuple[int, ...] = ()
    free: bool = False

    @property
    def reason(self) -> str:
        """Why a value is refused that would change what is drawn."""
        if self.free:
            return "this server draws from the model as it is"
        return "log-probs are those of the policy as it is"


@dataclass(frozen=True)
class ClientSampling:
    """What a client chose of the sampling; None leaves what the server has.

    Of the requests that wait, those with the lowest `priority` number begin first.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplyRequest:
    """A request for one reply: after `messages`, or after token ids where there are any.

    `token_ids` are those, or the tokenizer makes them of `prompt_text`; the reply to them is read
    as a text with `reads_text`. `more` are further replies of the request: the number of each in
    the answer is its `choice`. With `logprobs` the answer has those of the drawn tokens, of the
    prompt's with `echo`, and of the `num_top` likeliest tokens.

    `ignored` names the fields that say nothing about the reply. A seed is one of them where draws
    are keyed by the run. `unknown` names those that this gateway does not know.
    """

    model: str
    messages: list[Message] = field(default_factory=list)
    extras: TemplateExtras = field(default_factory=lambda: TemplateExtras([], {}))
    token_ids: NDArray[np.int32] | None = None
    prompt_text: str | None = None
    reads_text: bool = False
    max_tokens: int | None = None  # None: the recipe's limit
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    sampling: ClientSampling = ClientSampling()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    num_top: int = 0
    echo: bool = False
    names_ids: bool = False  # tokens are named by their ids
    choice: int = 0
    shares_prompt: bool = False  # with the reply before it, so its prompt is not counted again
    more: tuple[ReplyRequest, ...] = ()
    return_token_ids: bool = False
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def of_each(self, prompts: list[ReplyRequest], num_choices: int) -> ReplyRequest:
        """Return the request for so many replies to each of these, the first with the others."""
        every = [one for one in prompts for _ in range(num_choices)]
        if len(every) > 1 and self.stream:
            raise Refused("stream", "expected false, as this request asks for several replies")
        first, *more = (
            replace(one, choice=number, shares_prompt=number % num_choices > 0)
            for number, one in enumerate(every)
        )
        return replace(first, more=tuple(more))


class TokenScores(NamedTuple):
    """Log-probs of tokens that follow each other, and the likeliest tokens at their places.

    Shape: logprobs [M]; top_ids and top_logprobs [M, K], the likeliest first.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class ReplyStart(NamedTuple):
    """A reply before its first token. `num_cached` of the prompt's tokens were held before."""

    id: str
    created_s: int
    model: str
    num_prompt: int
    num_cached: int


@dataclass(frozen=True)
class PolicyReply:
    """A reply that the policy drew. `stop` is the text that ended it, or ""."""

    begun: ReplyStart
    message: Message
    finish: Finish
    stop: str
    data: TokenData
    join_prompt: Callable[[], NDArray[np.int32]] = field(repr=False)
    texts: EpisodeTexts = field(repr=False)
    scores: TokenScores | None = field(default=None, repr=False)  # the last are of the reply

    @cached_property
    def logprobs(self) -> list[float]:
        """Log-probs whose shortest decimal is that of the float32."""
        return shortest(self.data.logprobs)

    @cached_property
    def prompt_ids(self) -> NDArray[np.int32]:
        """All tokens before the reply. Shape: [T]."""
        return self.join_prompt()

    def tops(self, *, whole: bool = False) -> list[list[tuple[int, float]]]:
        """Return the likeliest tokens at each place of the reply, or of all that was scored."""
        if self.scores is None:
            return []
        first = 0 if whole else len(self.scores.logprobs) - len(self.data)
        rows = self.scores.top_ids[first:].tolist(), self.scores.top_logprobs[first:]
        return [
            [*zip(ids, shortest(values), strict=True)] for ids, values in zip(*rows, strict=True)
        ]

    @cached_property
    def kept_sets(self) -> list[list[int]]:
        """The ids from which each token was drawn; an empty list where nothing was left out."""
        if not self.data.kept:
            return [[] for _ in range(len(self.data))]
        counts, ids = decode_sets(np.frombuffer(self.data.kept, np.uint8))
        return [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])]

    def token_facts(self) -> dict[str, Any]:
        """Return versions and kept sets of the tokens."""
        return {"versions": self.data.versions.tolist(), "kept_sets": self.kept_sets}

    def facts(self) -> dict[str, Any]:
        """Return all that is known of the tokens, for clients that ask for token ids."""
        ids = {"prompt_token_ids": self.prompt_ids.tolist(), "token_ids": self.data.tokens.tolist()}
        return ids | {"logprobs": self.logprobs} | self.token_facts()


def shortest(values: NDArray[np.float32]) -> list[float]:
    """Return numbers that are written with as many digits as tell one float32 from the others."""
    return [float(text) for text in values.astype(np.float32).astype("U").tolist()]
