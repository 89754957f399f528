"""Engine of an episode: it asks the rank for turns and for token ids, and waits for the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import SpmdError
from spmd_rl.hooks.child.async_calls import Stopwatch
from spmd_rl.hooks.child.calls import EpisodeCall
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn
from spmd_rl.hooks.wire.messages import AskTexts, AskTurn, ToRank


class EpisodeEngine:
    """The rank's engine, for the functions of one episode. Several calls may run at once, each for
    a transcript of its own.
    """

    def __init__(
        self, episode: EpisodeCall, send: Callable[[ToRank], None], watch: Stopwatch
    ) -> None:
        self._episode, self._send, self._watch = episode, send, watch
        self._num_transcripts = 0
        self._num_asked = 0
        self._busy: set[int] = set()  # numbers of transcripts with a call
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def complete(
        self,
        transcript: Transcript,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Let the policy go on with the transcript, and return what it drew, which is appended.

        `max_tokens` and `stop` hold for this turn alone; without them the recipe's sampling does.
        Blocks: until the engine has drawn the turn; this time does not count for the deadline.
        Raises: ValueError for arguments without sense, and while another call for this transcript
        runs; SpmdError with the reason when the engine cannot go on.
        """
        if transcript.place is None:
            number, self._num_transcripts = self._num_transcripts, self._num_transcripts + 1
            index = self._episode.sample_index + number * self._episode.num_samples
            transcript.place = TranscriptPlace(number, index, self._episode.temperature)
        number = transcript.place.number
        if number in self._busy:
            raise ValueError("complete: another call for this transcript is still running")
        if max_tokens is not None and (max_tokens := int(max_tokens)) < 1:
            raise ValueError(f"complete: max_tokens = {max_tokens}: expected 1 or more")
        stops = None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(one, str) and one for one in stops or ()):
            raise ValueError("complete: stop holds something else than texts, or an empty one")
        past = transcript.data
        self._busy.add(number)
        try:
            turn: Turn = await self._ask(AskTurn, number, past, max_tokens, stops)
        finally:
            self._busy.discard(number)
        transcript.append(turn)
        return turn

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it, for `observe`.

        Blocks: until the rank has answered.
        """
        tokens: list[int] = await self._ask(AskTexts, text)
        return tokens

    async def decode(self, tokens: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of token ids, with special tokens.

        Blocks: until the rank has answered.
        Raises: ValueError for a negative number.
        """
        ids = np.asarray(tokens, np.int32)
        if (ids < 0).any():
            raise ValueError("decode: token ids are not negative")
        text: str = await self._ask(AskTexts, None, ids)
        return text

    async def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return what the chat template makes of messages, with the generation prompt.

        `template_kwargs` are more arguments of the template.
        Blocks: until the rank has answered.
        Raises: SpmdError with what the template says, when it refuses the messages.
        """
        chat = list(messages), list(tools or ()), dict(template_kwargs or {})
        text: str = await self._ask(AskTexts, None, None, chat)
        return text

    def answer(self, ask_id: int, value: Any) -> None:
        """Hand an answer of the rank to the function that waits for it, if it still does."""
        future = self._answers.get(ask_id)
        if future is None or future.done():
            return
        if isinstance(value, SpmdError):
            future.set_exception(value)
        else:
            future.set_result(value)

    async def _ask(self, question: Callable[..., ToRank], *values: Any) -> Any:
        """Send a question and wait for its answer."""
        ask_id, self._num_asked = self._num_asked, self._num_asked + 1
        future = self._answers[ask_id] = asyncio.get_running_loop().create_future()
        self._watch.pause()
        try:
            self._send(question(self._episode.call_id, ask_id, *values))
            return await future
        finally:
            self._watch.resume()
            del self._answers[ask_id]
