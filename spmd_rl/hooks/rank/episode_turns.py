"""Turns of one episode: which the engine has answered, and which it still draws.

A process that ended through another's fault runs its episodes again from their start. They then get
the turns that the engine has answered already, so that nothing is drawn twice.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from spmd_rl.hooks.transcript import Turn
from spmd_rl.hooks.wire.messages import Ask


class _Question(NamedTuple):
    """What an episode asked the engine; the answer depends on nothing else."""

    transcript: int
    past: bytes  # a digest
    max_tokens: int | None
    stop: tuple[str, ...] | None


class EpisodeTurns:
    """Questions and answers of one episode."""

    def __init__(self) -> None:
        self._answers: dict[_Question, Turn | str] = {}
        self._asked: dict[int, _Question] = {}  # by the id of the engine call
        self._waiting: dict[_Question, int] = {}  # the ask id under which the episode waits

    def ask(self, message: Ask, new_call_id: int) -> Turn | str | bool:
        """Return the answer to a question, or whether it is to be asked as `new_call_id`.

        A text says why the engine cannot answer. False says that it draws the answer already.
        """
        stop = None if message.stop is None else tuple(message.stop)
        past = blake2b(message.tokens.tobytes()).digest()
        question = _Question(message.transcript, past, message.max_tokens, stop)
        if question in self._answers:
            return self._answers[question]
        self._waiting[question] = message.ask_id
        if question in self._asked.values():
            return False
        self._asked[new_call_id] = question
        return True

    def answer(self, call_id: int, turn: Turn | str) -> int | None:
        """Keep an answer; return the ask id under which the episode waits for it, if it does."""
        question = self._asked.pop(call_id)
        self._answers[question] = turn
        return self._waiting.pop(question, None)

    def restart(self) -> None:
        """The episode starts again: nobody waits any more."""
        self._waiting.clear()
