"""Engine of an episode: it asks the rank for turns, and waits for the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import SpmdError
from spmd_rl.hooks.child.async_calls import Stopwatch
from spmd_rl.hooks.child.calls import EpisodeCall
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.hooks.transcript import END_OF_IDS, Transcript, TranscriptPlace, Turn, TurnLimits
from spmd_rl.hooks.wire.messages import AskTurn, CancelTurn, ToRank

OnTokens = Callable[[list[int]], None]


class RefusedTurn(SpmdError):
    """The engine does not take what an episode asks of it."""


class _OpenTurn:
    """A turn that the engine draws: who waits for it, and how many of its tokens were shown."""

    def __init__(self, transcript: int, on_tokens: OnTokens | None) -> None:
        self.transcript, self.on_tokens = transcript, on_tokens
        self.num_shown = 0
        self.turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()

    def show(self, tokens: list[int]) -> None:
        if self.on_tokens is not None and tokens:
            self.num_shown += len(tokens)
            self.on_tokens(tokens)


class EpisodeEngine:
    """The rank's engine, for the functions of one episode. Several calls may run at once, each for
    a transcript of its own.
    """

    def __init__(
        self,
        episode: EpisodeCall,
        send: Callable[[ToRank], None],
        watch: Stopwatch,
        texts: EpisodeTexts,
    ) -> None:
        self._episode, self._send, self._watch, self._texts = episode, send, watch, texts
        self._num_transcripts = 0
        self._num_asked = 0
        self._asked: dict[int, _OpenTurn] = {}

    async def complete(
        self,
        transcript: Transcript,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Let the policy go on with the transcript, and return what it drew, which is appended.

        `max_tokens` and `stop` hold for this turn alone; without them the recipe's sampling does.
        The turn ends at any of `stop_ids`, too. `on_tokens` is called in the event loop with each
        run of new token ids while they are drawn; the turn has them all.
        Blocks: until the engine has drawn the turn; this time does not count for the deadline. When
        the waiting task is cancelled, the engine stops drawing.
        Raises: ValueError for arguments without sense, and while another call for this transcript
        runs; RefusedTurn where the engine does not take such a turn; SpmdError with the reason when
        it cannot go on.
        """
        if transcript.place is None:
            number, self._num_transcripts = self._num_transcripts, self._num_transcripts + 1
            index = self._episode.sample_index + number * self._episode.num_samples
            transcript.place = TranscriptPlace(number, index, self._episode.temperature)
        number = transcript.place.number
        if self._ask_of(number) is not None:
            raise ValueError("complete: another call for this transcript is still running")
        limits = _limits(max_tokens, stop, stop_ids)
        turn = await self._draw(transcript, number, limits, on_tokens)
        transcript.append(turn)
        return turn

    def cancel(self, transcript: Transcript) -> None:
        """End the turn of this transcript that is drawn now, if any; its `complete` raises
        SpmdError. What was drawn of it is lost.
        """
        number = None if transcript.place is None else transcript.place.number
        if number is not None and (ask_id := self._ask_of(number)) is not None:
            self._send(CancelTurn(self._episode.call_id, ask_id))
            self.answer(ask_id, SpmdError("the turn was cancelled"))

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it, for `observe`."""
        return self._texts.encode(text)

    async def decode(self, tokens: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of token ids, with special tokens.

        Raises: ValueError for a negative number; SpmdError for an id that the tokenizer refuses.
        """
        return self._texts.decode(tokens)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return what the chat template makes of messages, with the generation prompt.

        `template_kwargs` are more arguments of the template.
        Raises: SpmdError with what the template says, when it refuses the messages.
        """
        return self._texts.render(messages, tools, template_kwargs)

    def show(self, ask_id: int, tokens: list[int]) -> None:
        """Hand new tokens of a turn to the function that wants to see them."""
        if asked := self._asked.get(ask_id):
            asked.show(tokens)

    def answer(self, ask_id: int, value: Turn | SpmdError) -> None:
        """Hand an answer of the rank to the function that waits for it, if it still does."""
        asked = self._asked.get(ask_id)
        if asked is None or asked.turn.done():
            return
        if isinstance(value, SpmdError):
            asked.turn.set_exception(value)
        else:
            asked.show(value.tokens[asked.num_shown :].tolist())
            asked.turn.set_result(value)

    def _ask_of(self, transcript: int) -> int | None:
        """Return under which id a turn of this transcript is waited for."""
        return next((key for key, one in self._asked.items() if one.transcript == transcript), None)

    async def _draw(
        self, transcript: Transcript, number: int, limits: TurnLimits, on_tokens: OnTokens | None
    ) -> Turn:
        """Ask the rank for a turn, and wait for it."""
        ask_id, self._num_asked = self._num_asked, self._num_asked + 1
        asked = self._asked[ask_id] = _OpenTurn(number, on_tokens)
        context = None if transcript.context is transcript.prompt.tokens else transcript.context
        self._watch.pause()
        try:
            self._send(
                AskTurn(
                    self._episode.call_id,
                    ask_id,
                    number,
                    transcript.data,
                    limits,
                    context,
                    on_tokens is not None,
                )
            )
            return await asked.turn
        except asyncio.CancelledError:
            self._send(CancelTurn(self._episode.call_id, ask_id))
            raise
        finally:
            self._watch.resume()
            del self._asked[ask_id]


def _limits(
    max_tokens: int | None, stop: Sequence[str] | None, stop_ids: Sequence[int]
) -> TurnLimits:
    """Return the limits of a turn. Raises: ValueError for those without sense."""
    if max_tokens is not None and (max_tokens := int(max_tokens)) < 1:
        raise ValueError(f"complete: max_tokens = {max_tokens}: expected 1 or more")
    stops = None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stops or ()):
        raise ValueError("complete: stop holds something else than texts, or an empty one")
    ids = tuple(map(int, stop_ids))
    if not all(0 <= one < END_OF_IDS for one in ids):
        raise ValueError("complete: stop_ids holds something else than token ids")
    return TurnLimits(max_tokens, stops, ids)
