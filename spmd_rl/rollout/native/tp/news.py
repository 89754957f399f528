"""News of a tensor-parallel engine: what its first rank tells the others between two steps.

Their schedulers must take the same steps. A scheduler asks whether requests have the very same
prompt object, so the wire keeps that too: between one request and the next.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.channel.codec import Codec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.types.token_data import NO_TOKENS, TokenData


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """A request. Its prompt is empty, and its sampling None, where they are those of the last."""

    uid: int
    index: int
    prompt: NDArray[np.int32]
    sampling: SamplingConfig | None
    past: TokenData
    seed: int
    priority: int


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """An end of requests, as `Engine.abort` takes it."""

    uid: int | None
    index: int | None


class News(msgspec.Struct, frozen=True):
    """What happened since the last news, in its order, and whether a step follows."""

    events: list[Submitted | Aborted]
    steps: bool


_CODEC = Codec(News, functions=False, repeats=False)


def encode(news: News) -> bytes:
    return msgspec.msgpack.encode(_CODEC.pack(news))


def decode(blob: bytes) -> News:
    """Raises: ContractError for bytes that are no news."""
    news: News = _CODEC.unpack(msgspec.msgpack.decode(blob, type=tuple[bytes, bytes]))
    return news


class RequestWriter:
    """Makes events of requests. Two have one prompt where one follows the other with it."""

    def __init__(self) -> None:
        self._given: Request | None = None
        self._kept: Request | None = None

    def copy(self, request: Request) -> Request:
        """Return the request as all ranks will have it."""
        given, kept = self._given, self._kept
        same_prompt = given is not None and request.prompt is given.prompt
        same_sampling = given is not None and request.sampling is given.sampling
        prompt = kept.prompt if kept and same_prompt else request.prompt.copy()
        sampling = kept.sampling if kept and same_sampling else replace(request.sampling)
        name = request.uid, request.index
        return Request(*name, prompt, sampling, request.past, request.seed, request.priority)

    def event(self, request: Request, copy: Request) -> Submitted:
        """Return the event of a request that was accepted as `copy`, and remember it."""
        kept, self._given, self._kept = self._kept, request, copy
        return Submitted(
            copy.uid,
            copy.index,
            NO_TOKENS if kept and copy.prompt is kept.prompt else copy.prompt,
            None if kept and copy.sampling is kept.sampling else copy.sampling,
            copy.past,
            copy.seed,
            copy.priority,
        )


class RequestReader:
    """Makes requests of events, on the other ranks."""

    def __init__(self) -> None:
        self._last: Request | None = None

    def request(self, event: Submitted) -> Request:
        last, prompt, sampling = self._last, event.prompt, event.sampling
        if last is not None:
            prompt = prompt if len(prompt) else last.prompt
            sampling = sampling or last.sampling
        assert sampling is not None
        name = event.uid, event.index
        self._last = Request(*name, prompt, sampling, event.past, event.seed, event.priority)
        return self._last
