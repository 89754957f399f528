"""An engine and a prompt for tests of environments: the policy says what a test lists."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd_rl.data.render.chat import Chat, render
from spmd_rl.environments.environment import Environment
from spmd_rl.environments.play import EpisodeLimits, play
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import TokenData
from tests.unit.data.chat_templates import CHATML, tokenizer_of

VERSION, LOGPROB = 3, -0.5


class SpokenEngine:
    """An engine that draws the texts that it is given; "" stands for a full context."""

    def __init__(self, drawn: Sequence[str], template: str = CHATML) -> None:
        self.tokenizer, self.drawn = tokenizer_of(template), [*drawn]
        self.pasts: list[str] = []  # all that the policy saw before each turn
        self.limits: list[int | None] = []
        self._num_transcripts = 0

    async def complete(
        self, transcript: Transcript, max_tokens: int | None = None, stop: Any = None
    ) -> Turn:
        if transcript.place is None:
            number, self._num_transcripts = self._num_transcripts, self._num_transcripts + 1
            transcript.place = TranscriptPlace(number, number, 1.0)
        past = [*transcript.context, *transcript.data.tokens]
        self.pasts.append(self.tokenizer.decode(past))
        self.limits.append(max_tokens)
        text = self.drawn.pop(0)
        ids = await self.encode(text + self.tokenizer.eos_token) if text else []
        ids = ids[:max_tokens]
        data = TokenData(
            np.array(ids, np.int32),
            np.full(len(ids), LOGPROB, np.float32),
            np.full(len(ids), VERSION, np.int32),
        )
        said = self.tokenizer.decode(ids, skip_special_tokens=True)
        turn = Turn(data, said, "completed" if text else "truncated")
        transcript.append(turn)
        return turn

    async def encode(self, text: str) -> list[int]:
        (ids,) = self.tokenizer([text], add_special_tokens=False)["input_ids"]
        return list(ids)

    async def decode(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    async def render(self, messages: Any, tools: Any = None, template_kwargs: Any = None) -> str:
        chat = Chat("messages", list(messages), list(tools or ()), dict(template_kwargs or {}))
        return render(chat, self.tokenizer, generation_prompt=True)


def chat_prompt(
    text: str = "begin", answer: str = "", template: str = CHATML, **values: Any
) -> Prompt:
    """Return a prompt of one user message."""
    tokenizer, messages = tokenizer_of(template), [{"role": "user", "content": text}]
    rendered = render(Chat("prompt", messages, [], {}), tokenizer, generation_prompt=True)
    (ids,) = tokenizer([rendered], add_special_tokens=False)["input_ids"]
    chat = {"messages": messages}
    return Prompt(7, np.array(ids, np.int32), rendered, answer, chat=chat, **values)


def episode(
    environment: Environment,
    engine: Any,
    prompt: Prompt | None = None,
    limits: EpisodeLimits = EpisodeLimits(10),  # noqa: B008  it is frozen
    seed: int = 0,
) -> list[Sample]:
    """Play an episode, and return its samples."""
    rng = np.random.default_rng(seed)
    return asyncio.run(play(environment, prompt or chat_prompt(), engine, limits, rng))
