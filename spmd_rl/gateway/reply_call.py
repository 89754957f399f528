"""A call that draws one reply: the clients that wait for it, and its text while it is drawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.messages import Message
from spmd_rl.gateway.dialects.request import (
    Finish,
    PolicyReply,
    ReplyRequest,
    ReplyStart,
    SamplingRules,
)
from spmd_rl.gateway.faults import Fault, fault_of
from spmd_rl.gateway.follow_template import opening_of
from spmd_rl.gateway.plan import Plan, SessionParts
from spmd_rl.gateway.replies import ReplyFormat, ReplyPiece, ReplyReader
from spmd_rl.gateway.turn_source import SourceTurn
from spmd_rl.hooks.transcript import Turn
from spmd_rl.types.samples import MODEL

_HALF_CHARACTER = "\ufffd"  # what a tokenizer makes of bytes that are no whole character


class ReplyCall:
    """One reply while it is drawn. A client that asks again for the same reply joins the call.

    When the last client has left before the end, the call is given up. `num_claims` counts the
    clients that wait for the answer, and those that got it.
    """

    def __init__(self, asked: ReplyRequest, num_bytes: int) -> None:
        self.asked, self.num_bytes = asked, num_bytes  # of the request
        self.begun: asyncio.Future[ReplyStart] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[PolicyReply]
        self._pieces: list[ReplyPiece] = []
        self._news = asyncio.Event()  # the next one for those who wait
        self._num_clients = self.num_claims = 0

    def start(self, task: asyncio.Task[PolicyReply]) -> None:
        """Take the task that draws the reply."""
        self.task = task
        task.add_done_callback(self._ended)

    def join(self) -> None:
        self._num_clients += 1
        self.num_claims += 1

    def leave(self, *, answered: bool) -> bool:
        """Note that a client does not wait any more; return whether nobody waits for the rest."""
        self._num_clients -= 1
        self.num_claims -= not answered
        return self._num_clients == 0 and not self.task.done()

    def add(self, pieces: Iterable[ReplyPiece]) -> None:
        """Hand new pieces of the reply to those who read it as a stream."""
        self._pieces += pieces
        self._wake()

    async def pieces(self, heartbeat_s: float) -> AsyncIterator[ReplyPiece | None]:
        """Yield the pieces as they come, and None where none came for so long.

        Blocks: until the call has ended.
        """
        at = 0
        while True:
            while at < len(self._pieces):
                yield self._pieces[at]
                at += 1
            if self.task.done():
                return
            try:
                await asyncio.wait_for(self._news.wait(), heartbeat_s)
            except TimeoutError:
                yield None

    def _ended(self, _: Any) -> None:
        if not self.begun.done():
            self.begun.cancel()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class ReplyDecoder:
    """Reads the tokens of one reply while they are drawn."""

    def __init__(
        self, parts: SessionParts, asked: ReplyRequest, plan: Plan, name: str, rules: SamplingRules
    ) -> None:
        self._texts, self._asked = parts.texts, asked
        self._call_tag = parts.replies.call_tags[0]
        self._ends = frozenset((*parts.texts.eos_ids, *asked.stop_ids, *rules.stop_ids))
        self._text = ReplyText(parts.texts.decode, self._ends, asked.stops)
        self._reads_text = plan.attach is not None or asked.reads_text
        self._reader: Any = None
        self.message: Message = {"role": MODEL, "content": ""}
        self.fault: Fault = ""
        self.raw = self.end = ""
        self.opening = opening_of(plan.text)
        if self._reads_text:
            form = ReplyFormat(None) if plan.attach is None else parts.replies
            tools = asked.extras.tools
            self._reader = ReplyReader(form, plan.text, tools, lambda at: f"call_{name}{at}")

    def add(self, ids: Sequence[int]) -> Any:
        """Take new tokens and return the pieces that they complete."""
        return self._reader.feed(self._text.add(ids)) if self._reads_text else []

    def finish(self, turn: Turn) -> Any:
        """Take the whole turn and return the last pieces."""
        ids = turn.tokens.tolist()
        ended = bool(ids) and ids[-1] in self._ends and turn.status == "completed"
        if not self._reads_text:
            return []
        self.raw = self._texts.decode(ids[:-1] if ended else ids)
        self.end = self._texts.decode(ids[-1:]) if ended else ""
        pieces = self.add(ids[self._text.num_tokens :])
        pieces += self._reader.feed(self._text.finish(ended=ended))
        pieces += self._reader.finish()
        self.message = self._reader.message
        self.fault = fault_of(self.message, self._asked.extras.tools, self._call_tag)
        return pieces

    def drawn(
        self, begun: ReplyStart, got: SourceTurn, prompt_ids: Callable[[], NDArray[np.int32]]
    ) -> PolicyReply:
        """Return what the client gets."""
        turn = got.turn
        finish: Finish = "length" if turn.status == "truncated" else "stop"
        if finish == "stop" and self.message.get("tool_calls"):
            finish = "tool_calls"
        told = begun, self.message, finish, self._text.stop, turn.data
        return PolicyReply(*told, prompt_ids, self._texts, got.scores)


class ReplyText:
    """Text of a reply, as a client sees it.

    `add` and `finish` return the text that is new. Held back is what may yet be taken away: the
    last token if it may be the end, bytes of half a character, and what may begin a stop.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        ends: Collection[int],
        stops: Sequence[str] = (),
    ) -> None:
        self._decode, self._ends = decode, frozenset(ends)
        self._cut = StopCut(stops)
        self._ids: list[int] = []
        self._num_given = 0  # tokens that were added, with the one that is held back
        self._last: list[int] = []  # held back, as it may be the end
        self._first = self._read = 0  # ids[first:read] is the context in which the rest is decoded

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were added."""
        return self._num_given

    @property
    def stop(self) -> str:
        """The stop that ended the text, or ""."""
        return self._cut.found

    def add(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that they complete."""
        if not ids:
            return ""
        self._num_given += len(ids)
        new = [*self._last, *ids]
        self._last = new[-1:] if new[-1] in self._ends else []
        self._ids += new[: len(new) - len(self._last)]
        return self._cut.add(self._complete(is_last=False))

    def finish(self, *, ended: bool) -> str:
        """Return the rest of the text. `ended` says that the last token ended the turn."""
        if not ended:
            self._ids += self._last
        self._last = []
        return self._cut.add(self._complete(is_last=True)) + self._cut.finish()

    def _complete(self, *, is_last: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._decode(self._ids[self._first : self._read])
        text = self._decode(self._ids[self._first :])
        if not is_last and (len(text) <= len(before) or text.endswith(_HALF_CHARACTER)):
            return ""
        self._first, self._read = self._read, len(self._ids)
        return text[len(before) :]


class StopCut:
    """Cuts a text where one of some stops is first complete, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""

    def add(self, text: str) -> str:
        """Take more text; return what is certain to stand before every stop."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        starts = {stop: self._held.find(stop) for stop in self._stops}
        if found := [(at + len(stop), at, stop) for stop, at in starts.items() if at >= 0]:
            _, at, self.found = min(found)
            return self._held[:at]
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        ready, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * bool(keep)
        return ready

    def finish(self) -> str:
        """Return what was held back and is no stop."""
        held, self._held = self._held, ""
        return "" if self.found else held


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of the text begin the stop."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
