"""Equality of messages: whether the message that a client sends is one that a session holds.

There is one rule. Two messages are the same if these are equal:

- the role, where "developer" is "system"; and the name of a speaker, but for the result of a tool;
- the text, whose parts are joined;
- the tool calls, by name and by parsed arguments, in which 1 is 1.0 but not true;
- for the result of a tool, the call that it answers: calls are counted, whatever their ids are;
- the thought, where the client sends one. A client that drops thoughts still matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from spmd_rl.data.render.messages import SYSTEM_ROLES, Message

DIGEST_BYTES = 16


class MessagePath:
    """Digests of the beginnings of a conversation, without its thoughts.

    `digests[i]` stands for the first i messages and for what the conversation began with, such as
    its tools; `bare[i]` stands for the messages alone. Equal digests mean equal beginnings.
    `single[i]` stands for message i alone.
    """

    def __init__(self, seed: bytes) -> None:
        self.digests = [_digest(seed)]
        self.bare = [_digest(b"")]
        self.single: list[bytes] = []
        self.thoughts: list[str] = []
        self._numbers: dict[str, int] = {}  # of calls, by the ids that the client knows
        self._num_calls = 0

    def __len__(self) -> int:
        return len(self.thoughts)

    @staticmethod
    def of(messages: Sequence[Message], seed: bytes = b"") -> MessagePath:
        path = MessagePath(seed)
        for message in messages:
            path.add(message)
        return path

    def add(self, message: Message) -> None:
        """Go on with a message, in the form of `data/logs`."""
        parts = msgspec.json.encode(self._parts(message), order="deterministic")
        for digests in (self.digests, self.bare):
            digests.append(_digest(digests[-1] + parts))
        self.single.append(_digest(parts))
        self.thoughts.append(message.get("reasoning_content") or "")

    def _parts(self, message: Message) -> list[Any]:
        role = message["role"]
        parts: list[Any] = ["system" if role in SYSTEM_ROLES else role, message["content"]]
        if role == "tool":
            given = message.get("tool_call_id", "")
            return [*parts, self._numbers.get(given, given)]
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            calls.append([function["name"], _plain(function["arguments"])])
            self._numbers[call.get("id", "")] = self._num_calls
            self._num_calls += 1
        return [*parts, message.get("name", ""), calls]


def same_thoughts(held: Sequence[str], given: Sequence[str]) -> bool:
    """Whether every thought that a client sent is the one that is held for this message."""
    return all(not ours or ours == theirs for theirs, ours in zip(held, given, strict=False))


def _plain(value: Any) -> Any:
    """Return JSON in which a whole number is written in one way."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
