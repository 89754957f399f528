"""An engine that draws texts that it is given, and the texts of its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import numpy as np

from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.token_data import TokenData
from tests.unit.data.chat_templates import CHATML, tokenizer_of

CALL_FORM = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True},
    },
}


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


class FakeTexts(EpisodeTexts):
    """The tokenizer of an episode process, with a template of the tests."""

    def __init__(self, template: str = CHATML) -> None:
        super().__init__(lambda: self.tokenizer)
        self.tokenizer = tokenizer_of(template)


def prompt_of(uid: int = 7) -> Prompt:
    return Prompt(uid, np.array([1, 2], np.int32), text="task", answer="85")


class FakeEngine:
    """Draws the texts of `replies` in order, or what a function makes of the prompt's text.

    With `gate`, a call waits for it after its first token. `started` is set by the first call.
    """

    def __init__(
        self,
        texts: FakeTexts,
        replies: Sequence[str] | Callable[[str], str] = (),
        version: int = 3,
    ) -> None:
        self.texts, self.version = texts, version
        self.replies = replies if callable(replies) else [*replies]
        self.prompts: list[list[int]] = []
        self.limits: list[int | None] = []
        self.drawn: list[tuple[list[int], list[int]]] = []  # prompt and turn of each finished call
        self.cancelled: list[Transcript] = []
        self.gate: asyncio.Event | None = None
        self.started = asyncio.Event()
        self.problem: Exception | None = None
        self._num_transcripts = 0

    async def complete(
        self,
        transcript: Transcript,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Turn:
        if transcript.place is None:
            transcript.place = TranscriptPlace(self._num_transcripts, self._num_transcripts, 1.0)
            self._num_transcripts += 1
        past = [*transcript.context.tolist(), *transcript.data.tokens.tolist()]
        self.prompts.append(past)
        self.limits.append(max_tokens)
        ends = (*self.texts.eos_ids, *stop_ids)
        text = self._text(self.texts.decode(past))
        ids = self.texts.encode(text)
        status = "completed" if ids and ids[-1] in ends else "truncated"
        if max_tokens is not None and len(ids) > max_tokens:
            ids, status = ids[:max_tokens], "truncated"
        for one in stop or ():
            if one in text:
                status = "completed"
        if on_tokens is not None and ids:
            on_tokens(ids[:1])
        self.started.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(transcript)
            raise
        if self.problem is not None:
            raise self.problem
        for at in range(1, len(ids), 3):
            if on_tokens is not None:
                on_tokens(ids[at : at + 3])
        turn = Turn(self._data(ids), self.texts.decode(ids, skip_special_tokens=True), status)
        self.drawn.append((past, ids))
        transcript.append(turn)
        return turn

    def _text(self, prompt: str) -> str:
        return self.replies(prompt) if callable(self.replies) else self.replies.pop(0)

    def _data(self, ids: list[int]) -> TokenData:
        tokens = np.array(ids, np.int32)
        logprobs = -np.float32(1) / (3 + tokens).astype(np.float32)
        return TokenData(tokens, logprobs, np.full(len(ids), self.version, np.int32))
