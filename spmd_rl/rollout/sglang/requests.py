"""Requests of an SGLang engine: what each is answered so far, and whether it waits or runs.

The scheduler sends the tokens that came since its last message. A request has a new name (rid) each
time that it starts. Names have one length, because the scheduler aborts by prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, DataError, SpmdError
from spmd_rl.kernels.runtime.splitmix import next64
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.request_validator import RequestValidator
from spmd_rl.rollout.native.stop_strings import StopStringMatcher
from spmd_rl.rollout.sglang.returned_routes import ReturnedRoutes
from spmd_rl.rollout.sglang.structs import (
    ALL_TOKENS,
    RoutedGenerateReqInput,
    SamplingParams,
    TokenizedGenerateReqInput,
    sampling_params_type,
    token_array,
)
from spmd_rl.types.prompts import prompt_name
from spmd_rl.types.routes import RouteIds
from spmd_rl.types.samples import SampleStatus
from spmd_rl.types.token_data import TokenData

Key = tuple[int, int]  # uid and index
STREAM_TOKENS = 8  # after so many, the rank looks for stops that the scheduler does not know


@dataclass
class OpenRequest:
    """A request in the engine. `rid` is its name while it runs, "" while it waits.

    `matcher` and `stop_ids` are the stops that the rank itself looks for.
    """

    request: Request
    matcher: StopStringMatcher | None = None
    stop_ids: frozenset[int] = frozenset()
    rid: str = ""
    is_stopped: bool = False  # by a stop that the rank looked for
    new: list[TokenData] = field(default_factory=list)
    first_routed: int = 0  # row from which the running request returns routes

    @property
    def key(self) -> Key:
        return self.request.uid, self.request.index

    def extend(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], version: int
    ) -> bool:
        """Add new tokens, up to the first that ends the sample by a stop of the rank's own.

        Returns whether there was one. Shape: [T].
        """
        length = self._stop_length(tokens)
        self.is_stopped = length is not None
        drawn = tokens[:length]
        versions = np.full(len(drawn), version, np.int32)
        self.new.append(TokenData(drawn, logprobs[:length], versions))
        return self.is_stopped

    def note_routes(self, rows: RouteIds, is_drawn: bool, num_layers: int) -> None:
        """Give what came since the start the routes of its rows (returned_routes.py)."""
        routes = ReturnedRoutes(rows, self.first_routed, is_drawn, num_layers)
        request, new = self.request, TokenData.join(self.new)
        self.new = []
        past = routes.added_to(request.past, new, len(request.prompt))
        self.request = request.after(past)

    def drop_last_token(self) -> None:
        """Forget the last token, so that the answer can go on."""
        request = self.answered()
        self.request = request.after(request.past.cut(0, -1))

    def answered(self) -> Request:
        """Return the request with its answer so far."""
        if self.new:
            past = TokenData.join([self.request.past, *self.new])
            self.request, self.new = self.request.after(past), []
        return self.request

    def _stop_length(self, tokens: NDArray[np.int32]) -> int | None:
        """Return how many of `tokens` come up to a stop, that one included; None without one."""
        if self.matcher is None and not self.stop_ids:
            return None
        for length, token in enumerate(tokens.tolist(), start=1):
            is_hit = self.matcher is not None and self.matcher.push(token)
            if is_hit or token in self.stop_ids:
                return length
        return None


class RequestTable:
    """All requests of an engine by (uid, index), and those that run by their rid."""

    def __init__(
        self,
        spec: ModelSpec,
        max_kv_tokens: int,
        decode: Callable[[tuple[int, ...]], str] | None,
        *,
        version: str,
        returns_routes: bool = False,
    ) -> None:
        """`version` is SGLang's. `decode` turns tokens into text, which stop strings need."""
        self.spec = spec
        self._params_type = sampling_params_type(version)
        self._returns_routes = returns_routes
        self._validator = RequestValidator(spec, max_kv_tokens)
        self._decode = decode
        self._open: dict[Key, OpenRequest] = {}
        self._running: dict[str, OpenRequest] = {}
        self._starts = count()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def rids(self) -> KeysView[str]:
        """The rids of all that runs."""
        return self._running.keys()

    def add(self, request: Request) -> OpenRequest:
        """Raises: DataError if its tokens can never fit; SpmdError if it is in the engine."""
        self._validator.check(request)
        if request.sampling.replay_routes and not self._returns_routes:
            raise ConfigError(
                "sampling.replay_routes is on for a request, and the engine was started without "
                "it: set it for the run"
            )
        key = request.uid, request.index
        if key in self._open:
            raise SpmdError(
                f"{prompt_name(request.uid)}, sample {request.index} is in the engine already"
            )
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_ids if sampling.ignore_eos else ())
        self._open[key] = added = OpenRequest(request, self._new_matcher(request), stop_ids)
        return added

    def waiting(self) -> list[OpenRequest]:
        return [one for one in self._open.values() if not one.rid]

    def running(self, rid: str) -> OpenRequest | None:
        return self._running.get(rid)

    def matching(self, uid: int | None, index: int | None) -> list[OpenRequest]:
        """Return the requests of `uid` and `index`; None matches every one."""
        return [
            one
            for key, one in self._open.items()
            if uid in (None, key[0]) and index in (None, key[1])
        ]

    def start(self, one: OpenRequest) -> TokenizedGenerateReqInput:
        """Name a waiting request, and return the message that starts it."""
        request = one.answered()
        one.rid = f"{request.uid:016x}.{request.index:08x}.{next(self._starts):08x}"
        self._running[one.rid] = one
        prompt = np.concatenate([request.prompt, request.past.tokens])
        message = TokenizedGenerateReqInput(
            rid=one.rid,
            input_ids=token_array(prompt),
            sampling_params=self._sampling_params(one),
            stream=one.matcher is not None or bool(one.stop_ids),
        )
        if not request.sampling.replay_routes:
            return message
        # the last row draws the first token; those before it are asked for once
        one.first_routed = len(prompt) - 1 if request.past.prompt_routes else 0
        return RoutedGenerateReqInput(**asdict(message), routed_experts_start_len=one.first_routed)

    def stop_running(self, one: OpenRequest) -> None:
        """Note that the scheduler has this request no more, or is to end it: it waits again."""
        del self._running[one.rid]
        one.rid = ""

    def remove(self, one: OpenRequest) -> None:
        if one.rid:
            self.stop_running(one)
        del self._open[one.key]

    def status_by_last_token(self, one: OpenRequest) -> SampleStatus | None:
        """Return how the answer so far has ended; None if it goes on."""
        request = one.answered()
        if not len(request.past):
            return None
        last = int(request.past.tokens[-1])
        if one.is_stopped or last in one.stop_ids or last in self._ends(request):
            return "completed"
        return "truncated" if request.num_tokens >= self._max_length(request) else None

    def _ends(self, request: Request) -> set[int]:
        """Return the tokens at which the scheduler ends a sample."""
        sampling = request.sampling
        return set() if sampling.ignore_eos else {*sampling.stop_ids, *self.spec.eos_ids}

    def _max_length(self, request: Request) -> int:
        return min(len(request.prompt) + request.sampling.max_tokens, self.spec.max_positions)

    def _sampling_params(self, one: OpenRequest) -> SamplingParams:
        request, sampling = one.request, one.request.sampling
        is_greedy = sampling.temperature == 0
        return self._params_type(
            max_new_tokens=self._max_length(request) - request.num_tokens,
            stop_token_ids=sorted(self._ends(request)) or None,
            temperature=sampling.scored_temperature,
            top_k=1 if is_greedy else min(sampling.top_k or ALL_TOKENS, ALL_TOKENS),
            top_p=1.0 if is_greedy else sampling.top_p,
            min_p=0.0 if is_greedy else sampling.min_p,
            ignore_eos=sampling.ignore_eos,
            stream_interval=STREAM_TOKENS,
            sampling_seed=sampling_seed(request),
            stop_strs=[],
            stop_regex_strs=[],
            is_normalized=True,
        )

    def _new_matcher(self, request: Request) -> StopStringMatcher | None:
        if not request.sampling.stop:
            return None
        if self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this engine was given none")
        matcher = StopStringMatcher(request.sampling.stop, self._decode)
        for token in request.past.tokens.tolist():
            matcher.push(token)
        return matcher


def sampling_seed(request: Request) -> int:
    """Return the seed of a request's draws, which SGLang uses in its deterministic mode."""
    mixed = np.zeros(1, np.uint64)
    for word in (request.seed, request.uid, request.index):
        mixed = next64(mixed ^ np.array([word], np.int64).view(np.uint64))
    return int(mixed[0] >> np.uint64(1))


def status_of(reason: dict[str, Any], request: Request) -> SampleStatus:
    """Return how the scheduler says that a request ended.

    Raises: DataError where it refused the request; SpmdError where the weights give NaN logits.
    """
    kind = reason.get("type")
    if isinstance(reason.get("matched"), str):  # no stop string was given to the scheduler
        raise SpmdError(
            f"the weights give NaN logits: {prompt_name(request.uid)}, sample {request.index}"
        )
    if kind == "stop":
        return "completed"
    if kind == "length":
        return "truncated"
    message = reason.get("message") or f"SGLang ended it: {kind}"
    raise DataError(f"{prompt_name(request.uid)}, sample {request.index}", str(message))


def joined(parts: Iterable[NDArray[Any]], dtype: type) -> NDArray[Any]:
    """Concatenate arrays, of which there may be none."""
    arrays = list(parts)
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)
