"""What a chat template shows of chats: what it leaves out is refused, since no model can read it.

A part of a chat is shown if the text is another one without it. One chat tells it for all of its
kind: messages of the same role and fields, between messages of the same roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from spmd_rl.data.message_fields import says_something
from spmd_rl.data.render.chat import Chat, render
from spmd_rl.data.render.messages import Message, begins_with_system, without
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.errors import DataError

# fields of a message that say nothing: ids pair calls with results, and weights are for learning
_SILENT = {"id", "tool_call_id", "weight"}
_OTHERS = _SILENT | {"role", "content", "tool_calls"}
_NO_ROLE = "no role of this name"


class _Part(NamedTuple):
    """A part of a chat. `number` is that of the message that has it; None: it is in none.

    `change` makes a chat that differs in this part alone.
    """

    kind: tuple[Any, ...]
    words: str
    number: int | None
    change: Callable[[Chat], Chat]


class ShownParts:
    """Refuses what a chat template ignores. It remembers the kinds of parts that were shown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: set[tuple[Any, ...]] = set()

    def require(self, chats: Iterable[Chat]) -> None:
        """Refuse chats of which the template does not show tools, a message, or a field of one.

        Raises: DataError, which names the first of them.
        """
        for chat in chats:
            for part in _parts(chat):
                if part.kind in self._shown:
                    continue
                if self._ignores(chat, part):
                    where = chat.where if part.number is None else chat.place(part.number)
                    problem = f"this model's chat template ignores the {part.words}"
                    raise DataError(where, problem)
                self._shown.add(part.kind)

    def _ignores(self, chat: Chat, part: _Part) -> bool:
        if not self._is_same(chat, part.number, part.change):
            return False
        if part.number is None or part.kind[0] != "role":
            return True
        # a role like no other is ignored where it is taken for one of these; a template that shows
        # no roles at all takes it for both
        taken = [
            self._is_same(chat, part.number, _message_change(part.number, _role_change(role)))
            for role in ("user", "assistant")
        ]
        return taken.count(True) == 1

    def _is_same(self, chat: Chat, number: int | None, change: Callable[[Chat], Chat]) -> bool:
        """Whether the template makes the same text of a chat and of a changed one.

        A template may leave the thoughts out of earlier turns, so a turn is looked at alone too.
        """
        is_over = chat.messages[-1]["role"] == "assistant"
        text, changed = render(chat, self._tokenizer, generation_prompt=not is_over), change(chat)
        if self._rendered(changed, None, generation_prompt=not is_over) != text:
            return False
        if number is None or chat.messages[number]["role"] != "assistant":
            return True
        turn = partial(self._rendered, num_messages=number + 1, generation_prompt=False)
        return turn(changed) == turn(chat)

    def _rendered(
        self, chat: Chat, num_messages: int | None, *, generation_prompt: bool
    ) -> str | None:
        """Return the text of a chat; None if the template refuses it."""
        try:
            return render(chat, self._tokenizer, num_messages, generation_prompt=generation_prompt)
        except DataError:
            return None


def _parts(chat: Chat) -> Iterator[_Part]:
    """Yield all that a template is to show of a chat."""
    if chat.tools:
        yield _Part(("tools",), "tools", None, lambda chat: replace(chat, tools=[]))
    if len(chat.tools) > 1:
        kind = ("tools", "several")
        yield _Part(kind, "last tool", None, lambda chat: replace(chat, tools=chat.tools[:-1]))
    roles = ["", *(message["role"] for message in chat.messages), ""]
    about = bool(chat.tools), repr(chat.template_kwargs)
    called: set[str] = set()
    for number, message in enumerate(chat.messages):
        if message["role"] == "tool" and message.get("name") in called:
            message = without(message, ["name"])  # the call that it answers shows the name
        called |= _called(message)
        fields = frozenset(key for key, value in message.items() if says_something(value))
        around = (*roles[number : number + 3], fields, about)
        is_prompt = number == 0 and begins_with_system(chat.messages)
        for name, words, change in _changes(message, is_prompt):
            yield _Part((name, *around), words, number, _message_change(number, change))


def _changes(
    message: Message, is_prompt: bool
) -> Iterator[tuple[str, str, Callable[[Message], Message]]]:
    """Yield each part of a message: its name, words that name it, and what changes it alone.

    `is_prompt` says that the message is the system prompt.
    """
    role = message["role"]
    if message["content"]:
        words = "system prompt" if is_prompt else f"content of this message of the role {role!r}"
        yield "content", words, lambda m: m | {"content": m["content"] + "."}
    if role not in ("user", "assistant"):
        yield "role", f"role {role!r}", _role_change(_NO_ROLE)
    if calls := message.get("tool_calls"):
        yield "tool_calls", "tool calls", partial(without, fields=["tool_calls"])
        if _without_arguments(message) != message:
            yield "arguments", "arguments of tool calls", _without_arguments
        if len(calls) > 1:
            yield "last call", "last tool call", lambda m: m | {"tool_calls": m["tool_calls"][:-1]}
    for field, value in message.items():
        # a number of the assistant's may be meant to say whether the message is learned
        is_text = isinstance(value, (str, list, dict)) or role == "assistant"
        if field not in _OTHERS and is_text and says_something(value):
            words = f"{field!r} of this message of the role {role!r}"
            yield field, words, _field_change(field, value)


def _called(message: Message) -> set[str]:
    """Return the names of the functions that a message calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return {call["name"] for call in calls if isinstance(call, dict) and "name" in call}


def _message_change(number: int, change: Callable[[Message], Message]) -> Callable[[Chat], Chat]:
    def changed(chat: Chat) -> Chat:
        messages = [*chat.messages]
        messages[number] = change(messages[number])
        return replace(chat, messages=messages)

    return changed


def _role_change(role: str) -> Callable[[Message], Message]:
    return lambda message: message | {"role": role}


def _field_change(field: str, value: Any) -> Callable[[Message], Message]:
    """Return what takes a field out; a number or truth value becomes the opposite of what it is."""
    if isinstance(value, (bool, int, float)):
        return lambda message: message | {field: not value}
    return partial(without, fields=[field])


def _without_arguments(message: Message) -> Message:
    calls = [
        call | {"function": call["function"] | {"arguments": {}}}
        if isinstance(call.get("function"), dict)
        else call | {"arguments": {}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}
