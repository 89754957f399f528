"""Engine protocol: requests go in one by one, and tokens come out step by step.

A request is named by (uid, index): the uid of the prompt and the index of the sample. A partial
answer can be submitted again. So `abort` may end an answer that goes on later, under the same
weights or others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.offload.residency import Receipt
from spmd_rl.types.samples import Sample, SampleStatus
from spmd_rl.types.token_data import NO_DATA, NO_LOGPROBS, NO_TOKENS, TokenData

if TYPE_CHECKING:
    from spmd_rl.weights.ends import WeightSink


# float32, in which logits are divided, holds both and their inverses
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e30
# with these values, each of the vocabulary may be drawn
ALL_TOKENS = {"top_k": 0, "top_p": 1, "min_p": 0}
UNDECODED = "\ufffd"  # what a decoder shows for bytes that are no text


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn, and over which of them log-probs are recorded."""

    num_samples: int = 1  # of each prompt
    # 0 takes the most likely token; its log-prob is recorded at temperature 1
    temperature: float = 1.0
    # draw from the likeliest tokens of this total probability; 1 is all
    top_p: float = 1.0
    top_k: int = 0  # draw from this many of the likeliest tokens; 0 is all
    # draw from tokens of at least this share of the likeliest one's probability; 0 is all
    min_p: float = 0.0
    # return the set of tokens that top_k, top_p and min_p kept: log-probs, and the trainer's
    # softmax, are then those over this set (the native engine does)
    replay_filters: bool = True
    # record the experts of each token, for mixtures: the trainer's router then takes them too
    replay_routes: bool = False
    max_tokens: int = 128  # of a sample, besides its prompt
    # end a sample and stay in it, like the model's own end-of-sequence ids
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # strings that end a sample and stay in it
    ignore_eos: bool = False  # go on past the model's end-of-sequence ids

    def __post_init__(self) -> None:
        require(self.num_samples >= 1, "num_samples", self.num_samples, "at least 1")
        fits = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        expected = f"0 (greedy), or at least {MIN_TEMPERATURE:g} and at most {MAX_TEMPERATURE:g}"
        require(fits, "temperature", self.temperature, expected)
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        expected = "0 (all) or more, and less than 2^63"
        require(0 <= self.top_k < 1 << 63, "top_k", self.top_k, expected)
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        are_ids = all(0 <= token < 1 << 31 for token in self.stop_ids)
        require(are_ids, "stop_ids", self.stop_ids, "token ids, in [0, 2^31)")
        require(all(self.stop), "stop", self.stop, "strings that are not empty")
        is_text = not any(UNDECODED in text for text in self.stop)
        expected = "strings without U+FFFD, which stands for bytes that are no text"
        require(is_text, "stop", self.stop, expected)

    @property
    def scored_temperature(self) -> float:
        """The temperature at which log-probs are recorded."""
        return self.temperature or 1.0

    @property
    def truncation(self) -> dict[str, float]:
        """The settings, if any, that exclude tokens from the draw."""
        values = {name: getattr(self, name) for name in ALL_TOKENS}
        return {name: value for name, value in values.items() if value != ALL_TOKENS[name]}

    @property
    def replays(self) -> bool:
        """Return whether kept sets are asked for. Greedy tokens are drawn from all tokens."""
        return self.replay_filters and self.temperature > 0 and bool(self.truncation)


def refuse_greedy(sampling: SamplingConfig) -> None:
    """Raise a ConfigError at temperature 0, for recipes that learn from the samples."""
    expected = (
        "more than 0, because else all samples of a prompt are the same and nothing is learned"
    )
    require(sampling.temperature > 0, "sampling.temperature", sampling.temperature, expected)


def refuse_replay(sampling: SamplingConfig) -> None:
    """Raise a ConfigError where filters are replayed, for losses over the whole vocabulary."""
    expected = "false beside top_k, top_p or min_p, because this loss is over all tokens"
    require(not sampling.replays, "sampling.replay_filters", sampling.replay_filters, expected)


def check_stop_ids(sampling: SamplingConfig, vocab_size: int) -> None:
    """Raise a ConfigError when a stop id is no token of the model, and could never end a sample."""
    if unknown := [token for token in sampling.stop_ids if token >= vocab_size]:
        raise ConfigError(
            f"sampling.stop_ids holds {unknown[0]}: the ids of this model end at {vocab_size - 1}"
        )


# Priorities: somebody waits for the answer; the next push waits for an evaluation; all others,
# of which each group has a number of its own from TRAINING on, in the order of their beginnings.
INTERACTIVE, EVALUATION, TRAINING = range(3)

# Changing a copy of it takes less time than making a new one.
_EMPTY_SAMPLE = Sample(0, 0, NO_TOKENS, NO_LOGPROBS, NO_TOKENS, "aborted")


class Request(msgspec.Struct, frozen=True):
    """One sample to generate. Its draws depend on (seed, uid, index) alone.

    `past` is its answer so far, if it was started before. Of the requests that wait, the native
    engine begins those with the lowest `priority` number first; no bit depends on it.
    It is a struct because two are made for each sample, and a frozen dataclass takes six times as
    long.
    Shape: `prompt` [P].
    """

    uid: int
    index: int
    prompt: NDArray[np.int32]
    sampling: SamplingConfig
    past: TokenData = NO_DATA
    seed: int = 0
    priority: int = INTERACTIVE

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.past)

    def resumed(self, partial: Sample) -> Request:
        """Return the request that continues after `partial`.

        Its random stream is the one it would have had without the pause.
        """
        return self.after(partial.data)

    def after(self, past: TokenData) -> Request:
        """Return the request with another answer so far."""
        same = self.uid, self.index, self.prompt, self.sampling
        return Request(*same, past, self.seed, self.priority)

    def sample(self, status: SampleStatus) -> Sample:
        return _EMPTY_SAMPLE.with_data(
            self.past,
            prompt_uid=self.uid,
            index=self.index,
            status=status,
            temperature=self.sampling.scored_temperature,
            parts={},
            metadata={},
        )


@dataclass(frozen=True)
class StepOutput:
    """The tokens that one step added: token m belongs to sample (uids[m], indices[m]).

    `started` names the requests whose first tokens the engine has begun to compute, if it knows,
    and `cached` says how many tokens of each it had computed before.
    Shape: `uids`, `indices`, `tokens`, `logprobs` are [M].
    """

    uids: NDArray[np.int64]
    indices: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finished: list[Sample]
    started: list[tuple[int, int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


class Engine(Protocol):
    """Takes tokens and returns tokens. It never re-renders text."""

    @property
    def has_work(self) -> bool: ...

    @property
    def version(self) -> int | None:
        """The version of the weights; None while they are of none that is known."""
        ...

    @property
    def is_pushing(self) -> bool:
        """Whether weights are being pushed: until the commit, `step` would raise."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run now, and how many wait for a place."""
        ...

    def submit(self, request: Request) -> None:
        """Queue one request.

        Raises: DataError if its tokens can never fit; SpmdError if (uid, index) is in the engine.
        """
        ...

    def step(self) -> StepOutput:
        """Compute one batch of tokens.

        An engine with asynchronous scheduling returns the batch before it.
        """
        ...

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        """End the requests of `uid` and `index`; None matches every one.

        Returns their unfinished samples, whose `status` is "aborted".
        """
        ...

    def snapshot(self) -> list[Sample]:
        """Return every unfinished sample as `abort` would, and go on with it."""
        ...

    def sleep(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Give memory back: of "weights", of "kv", or (without tags) of both.

        Requests in flight wait. Weights that a link pushes are gone until its next push.
        """
        ...

    def wake(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Take the memory again. Raises: ResidencyError if too little is left."""
        ...

    def sink(self) -> WeightSink:
        """Return where a push puts weights.

        From its `open` to its `commit`, and before the first, `step` raises an error. A commit
        forgets all K/V. Requests in flight continue: they compute theirs again under the new
        weights.
        """
        ...

    def contract(self) -> dict[str, str | int] | None:
        """Return the facts that its bits depend on, besides the weights (kernels/contract.py)."""
        ...

    def stats(self) -> dict[str, int]:
        """Return counts since the start."""
        ...
