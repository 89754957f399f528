"""Tree of the conversations that a client has held in a session, by messages or by token ids.

There is one rule for whether a client sends a message that a session holds. Two messages are the
same if these are equal:

- the role, where "developer" is "system"; and the name of a speaker, but for the result of a tool;
- the text, whose parts are joined;
- the tool calls, by name and by parsed arguments, in which 1 is 1.0 but not true;
- for the result of a tool, the call that it answers: calls are counted, whatever their ids are;
- the thought, where the client sends one. A client that drops thoughts still matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.messages import SYSTEM_ROLES, Message
from spmd_rl.types.samples import MODEL

T = TypeVar("T")
Reason = Literal["extends", "new", "rewritten", "tools changed"]
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


@dataclass(eq=False)
class ReplyNode(Generic[T]):
    """A reply of the policy, with the messages that were added before it.

    `messages` are those that this node adds to its parent, the reply last. `num_messages` counts
    those of the whole path. `held` is what the session keeps for it.
    """

    parent: ReplyNode[T] | None
    messages: list[Message]
    num_messages: int
    held: T

    def path(self) -> list[ReplyNode[T]]:
        """Return the nodes from the first one to this one."""
        node: ReplyNode[T] | None = self
        nodes: list[ReplyNode[T]] = []
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Attach(Generic[T]):
    """Where a conversation goes on: after `node`, with the messages `rest`.

    `reason` is "extends" after a node, and "new" at the start. It is "rewritten" where the rest
    holds a reply that does not go on from there: one of this session whose past was changed, or one
    that it has not drawn after a first message that it knows. It is "tools changed" where a node
    would fit if the tools were those of before.
    """

    node: ReplyNode[T] | None
    rest: list[Message]
    reason: Reason
    path: MessagePath = field(repr=False)


class MessageTree(Generic[T]):
    """Replies of a session, found by the messages that lead to them."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, list[ReplyNode[T]]] = {}  # by the digest of all messages
        self._without_tools: set[bytes] = set()  # digests of the same messages
        self._first: set[bytes] = set()  # digests of first messages
        self._replies: set[bytes] = set()  # digests of replies, whatever was before them

    def attach(self, messages: Sequence[Message], tools: bytes) -> Attach[T]:
        """Return the deepest node whose whole path is a prefix of the messages.

        `tools` is whatever else the template shows, such as the definitions of tools. Of several
        nodes with the same messages the newest is taken, whose thoughts are those that were sent.
        """
        path = MessagePath.of(messages, tools)
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] != MODEL:
                continue
            for node in reversed(self._nodes.get(path.digests[length], ())):
                if same_thoughts(_thoughts(node), path.thoughts):
                    rest = list(messages[length:])
                    return Attach(node, rest, "rewritten" if _replies(rest) else "extends", path)
        return Attach(None, list(messages), self._reason(messages, path), path)

    def _reason(self, messages: Sequence[Message], path: MessagePath) -> Reason:
        if not _replies(messages):
            return "new"
        if any(digest in self._without_tools for digest in path.bare):
            return "tools changed"
        is_known = path.bare[1] in self._first
        return "rewritten" if is_known or self._replies & set(path.single) else "new"

    def add(self, attach: Attach[T], reply: Message, held: T) -> ReplyNode[T]:
        """Add a reply to the place where it was drawn, and return its node."""
        messages = [*attach.rest, reply]
        before = attach.node.num_messages if attach.node else 0
        node = ReplyNode(attach.node, messages, before + len(messages), held)
        attach.path.add(reply)
        self._nodes.setdefault(attach.path.digests[-1], []).append(node)
        self._without_tools.add(attach.path.bare[-1])
        self._first.add(attach.path.bare[1])
        self._replies.add(attach.path.single[-1])
        return node


def _replies(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == MODEL]


def _thoughts(node: ReplyNode[T]) -> list[str]:
    messages = (message for one in node.path() for message in one.messages)
    return [message.get("reasoning_content") or "" for message in messages]


class TokenTree(Generic[T]):
    """Turns of a session, found by the token ids that lead to them."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, bytes], T] = {}  # by number of tokens and their digest
        self._lengths: set[int] = set()

    def add(self, ids: NDArray[np.int32], turn: T) -> None:
        """Add a turn. Shape: ids [T], all tokens up to its end."""
        self._lengths.add(len(ids))
        self._turns[len(ids), _digest(np.ascontiguousarray(ids).tobytes())] = turn

    def find(self, ids: NDArray[np.int32]) -> tuple[T | None, int]:
        """Return the deepest turn whose tokens are a true prefix of these, and their number."""
        running, at, found, found_at = blake2b(digest_size=DIGEST_BYTES), 0, None, 0
        for length in sorted(self._lengths):
            if length >= len(ids):
                break
            running.update(np.ascontiguousarray(ids[at:length]).tobytes())
            at = length
            turn = self._turns.get((length, running.copy().digest()))
            if turn is not None:
                found, found_at = turn, length
        return found, found_at


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
