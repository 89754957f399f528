"""Turns of a server: each request of a client stands alone, and becomes one of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.gateway.dialects.request import (
    ClientSampling,
    Refused,
    ReplyRequest,
    SamplingRules,
    TokenScores,
)
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.turn_source import SourceTurn
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.results import BadResult
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn, TurnStatus
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.episode_samples import ModelLimits
from spmd_rl.serve.engine_thread import NUM_CACHED, EngineThread
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import NO_TOKENS, TokenData

Score = Callable[[NDArray[np.int32], int, int, float], TokenScores]
SIZE = 1 << 63  # of the numbers that name prompts


def prompt_uid(tokens: NDArray[np.int32], choice: int = 0) -> int:
    """Return the uid of a prompt whose draws have a seed of the client: a digest of its tokens.

    The client's seed is then the index of the sample among those of the prompt. `choice` is the
    number of the reply, where a request asks for several.
    """
    data = np.ascontiguousarray(tokens, np.int32).tobytes() + (b"%d" % choice if choice else b"")
    digest = blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") % SIZE


class ServedTurns:
    """Draws turns with the sampling that clients choose. A `TurnSource`.

    `score` gives log-probs of tokens (`token_scores.score`), in the thread of the engine.
    `sampling` is what holds where a client says nothing, and `seed` that of all draws. Two requests
    with the same prompt and the same seed of the client are drawn one after the other.
    """

    def __init__(
        self,
        engine: EngineThread,
        score: Score,
        sampling: SamplingConfig,
        limits: ModelLimits,
        seed: int,
        max_waiting: int,
    ) -> None:
        self._engine, self._score, self._sampling, self._limits = engine, score, sampling, limits
        self._seed, self._max_waiting = seed, max_waiting
        self._uids = count()  # of requests without a seed

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a turn whatever the client says."""
        return self._sampling.stop_ids

    async def draw(
        self,
        transcript: Transcript,
        asked: ReplyRequest,
        max_tokens: int | None,
        on_tokens: Callable[[list[int]], None] | None,
    ) -> SourceTurn:
        """Draw a turn; without a limit of the client, up to the end of the context.

        Raises: Refused for what the engine does not take, and while too many requests are open.
        """
        if self._engine.num_open >= self._max_waiting:
            problem = f"{self._max_waiting} requests are open already"
            raise Refused("", problem, status=429, retry_after_s=1)
        request = self._request(transcript, asked, max_tokens)
        got = SourceTurn(Turn(TokenData(), "", "truncated"))
        try:
            if max_tokens != 0:
                got = _turn_of(await self._engine.draw(request, on_tokens))
            if asked.logprobs and (asked.echo or asked.num_top):
                got = got._replace(scores=await self._scores(request, asked, got.turn))
        except (DataError, ConfigError) as error:
            raise Refused("", str(error)) from error
        transcript.place = TranscriptPlace(0, 0, request.sampling.scored_temperature)
        transcript.append(got.turn)
        return got

    async def _scores(
        self, request: Request, asked: ReplyRequest, turn: Turn
    ) -> TokenScores | None:
        """Return the scores of a turn, and with `echo` those of its prompt before it, if any."""
        tokens = np.concatenate([request.prompt, turn.data.tokens])
        first = 1 if asked.echo else len(request.prompt)
        if first == len(tokens):
            return None
        given = tokens, first, asked.num_top, request.sampling.scored_temperature
        return await self._engine.call(partial(self._score, *given))

    def _request(
        self, transcript: Transcript, asked: ReplyRequest, max_tokens: int | None
    ) -> Request:
        """Return the request of a turn. Raises: Refused."""
        tokens = np.concatenate([transcript.context, transcript.data.tokens])
        room = self._limits.context_tokens - len(tokens)
        try:
            self._limits.check_ids(tokens)
            sampling = _sampling_of(self._sampling, asked, max_tokens or room)
        except BadResult as error:
            raise Refused("", f"the prompt {error}") from error
        except ConfigError as error:
            raise Refused("", str(error)) from error
        seed = asked.sampling.seed
        key = (next(self._uids), 0) if seed is None else (prompt_uid(tokens, asked.choice), seed)
        priority = asked.sampling.priority
        return Request(*key, tokens, sampling, seed=self._seed, priority=priority)


def _turn_of(sample: Sample) -> SourceTurn:
    ended: TurnStatus = "completed" if sample.status == "completed" else "truncated"
    return SourceTurn(Turn(sample.data, "", ended), sample.metadata[NUM_CACHED])


def _sampling_of(base: SamplingConfig, asked: ReplyRequest, max_tokens: int) -> SamplingConfig:
    """Return the sampling of one request. Raises: ConfigError."""
    own: ClientSampling = asked.sampling
    names = ("temperature", "top_p", "top_k", "min_p")
    chosen = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    return replace(
        base,
        num_samples=1,
        max_tokens=max_tokens,
        stop=asked.stops or base.stop,
        stop_ids=base.stop_ids + asked.stop_ids,
        **chosen,
    )


class ServedSessions:
    """Gives each request a session of its own: nothing of it is kept. A `SessionFinder`.

    `key` is what clients must send; with "", they need none.
    """

    def __init__(
        self, parts: SessionParts, turns: ServedTurns, key: str, root_url: str, version: int
    ) -> None:
        self._parts, self._turns, self._key, self._root_url = parts, turns, key, root_url
        self._version = version
        self._rules = SamplingRules(stop_ids=turns.stop_ids, free=True)
        self._numbers = count()

    @property
    def parts(self) -> SessionParts:
        """What all sessions share."""
        return self._parts

    def find(self, key: str, name: str = "") -> Session:
        """Return a new session. Raises: Refused for a wrong key."""
        if self._key and not secrets.compare_digest(_bytes(key), _bytes(self._key)):
            problem = "this key is wrong" if key else "there is no key"
            raise Refused("", problem, status=401, code="invalid_api_key")
        ctx = HookContext(version=self._version)
        prompt = Prompt(next(self._numbers), NO_TOKENS)
        return Session(
            self._parts,
            "",
            self._root_url,
            ctx,
            prompt,
            self._turns,
            self._rules,
            max_turns=0,
            forget=lambda session: None,
        )


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "replace")
