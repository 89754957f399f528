"""Reply of a call while it is drawn: its text, its message, and its tokens at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.messages import Message
from spmd_rl.gateway.dialects.asked import Asked, Begun, Drawn, Finish, SamplingRules
from spmd_rl.gateway.drawn_text import DrawnText
from spmd_rl.gateway.faults import Fault, fault_of
from spmd_rl.gateway.follow_template import opening_of
from spmd_rl.gateway.plan import Plan, SessionParts
from spmd_rl.gateway.replies import ReplyFormat, ReplyReader
from spmd_rl.gateway.turn_source import SourceTurn
from spmd_rl.hooks.transcript import Turn
from spmd_rl.types.samples import MODEL


class Drawing:
    """Reads the tokens of one reply while they are drawn."""

    def __init__(
        self, parts: SessionParts, asked: Asked, plan: Plan, name: str, rules: SamplingRules
    ) -> None:
        self._texts, self._asked = parts.texts, asked
        self._call_tag = parts.replies.call_tags[0]
        self._ends = frozenset((*parts.texts.eos_ids, *asked.stop_ids, *rules.stop_ids))
        self._text = DrawnText(parts.texts.decode, self._ends, asked.stops)
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
        self, begun: Begun, got: SourceTurn, prompt_ids: Callable[[], NDArray[np.int32]]
    ) -> Drawn:
        """Return what the client gets."""
        turn = got.turn
        finish: Finish = "length" if turn.status == "truncated" else "stop"
        if finish == "stop" and self.message.get("tool_calls"):
            finish = "tool_calls"
        stop, data, texts = self._text.stop, turn.data, self._texts
        told = begun, self.message, finish, stop, data
        return Drawn(*told, prompt_ids, texts.decode, texts.token_bytes, got.scores)
