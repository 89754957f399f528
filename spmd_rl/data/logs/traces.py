"""Rows of Langfuse, LangSmith and TRL: what went into a call, and what came out of it.

Either is a text, a message, a list of messages, or an object around one of these, which may be
written as JSON text. LangChain's messages have other names.
"""

from __future__ import annotations

import json
from typing import Any

from spmd_rl.data.logs import openai_chat
from spmd_rl.data.logs.form import Json, ToolCalls, functions, get, items_of, record
from spmd_rl.errors import DataError

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}
_ROLES |= {"system": "system", "tool": "tool"}
_AROUND = ("messages", "generations", "message", "choices", "kwargs", "data")
_CHOICES = ("choices", "generations")


def read(row: Json, asked: str, answered: str) -> Json:
    """Return our form of a row that has the two sides of a call under these keys.

    Raises: DataError.
    """
    before, after = _parsed(row.get(asked)), _parsed(row.get(answered))
    items, replies = _messages(before, "user", asked), _messages(after, "assistant", answered)
    if not replies:
        raise DataError(answered, "there is no reply")
    if replies[: len(items)] == items:  # a graph returns the whole conversation
        items = []
    calls, places = ToolCalls(), enumerate([*items, *replies])
    messages = [openai_chat.read_message(one, f"message {n}", calls) for n, one in places]
    request = before if isinstance(before, dict) else row
    return record(row, (asked, answered), messages, [tool for _, tool in functions(request)])


def _parsed(value: Any) -> Any:
    """Return what is written as JSON text, and any other text as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # a text that only begins like JSON
        return value


def _messages(value: Any, role: str, where: str) -> list[Json]:
    """Return the messages in a value, in the form of OpenAI. `role` says a text that has none."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        if len(value) > 1 and isinstance(value[0], list):
            raise DataError(where, f"expected one conversation, got {len(value)}")
        places = enumerate(value)
        return [one for n, item in places for one in _messages(item, role, f"{where}[{n}]")]
    if not isinstance(value, dict):
        raise DataError(where, f"expected messages or a text, got {type(value).__name__}")
    return [value] if "role" in value else _of_object(value, role, where)


def _of_object(value: Json, role: str, where: str) -> list[Json]:
    """Return the messages of an object that is a message of LangChain, or has messages in it."""
    if value.get("type") in _ROLES and "content" in value:
        return [_of_langchain(value, where)]
    for key in (key for key in _AROUND if key in value):
        inner = value[key]
        if key == "kwargs" and isinstance(inner, dict) and "id" in value:
            inner = {"type": _kind(value["id"]), **inner}
        found = _messages(inner, role, f"{where}.{key}")
        if key in _CHOICES and len(found) != 1:
            raise DataError(f"{where}.{key}", f"expected one choice, got {len(found)}")
        return found
    texts = [one for one in value.values() if isinstance(one, str)]
    if "content" in value or len(value) == len(texts) == 1:
        return [{"role": role, "content": texts[0] if texts else None, **value}]
    names = ", ".join(map(repr, value)) or "nothing"
    raise DataError(where, f"expected messages or a text, got an object with {names}")


def _of_langchain(value: Json, where: str) -> Json:
    """Return a message of LangChain's in the form of OpenAI."""
    calls = []
    for place, call in items_of(value, "tool_calls", where, needed=False):
        function = {"name": get(call, "name", place), "arguments": call.get("args")}
        calls.append({"id": call.get("id"), "function": function})
    kept = {key: value.get(key) for key in ("content", "tool_call_id")}
    more = value.get("additional_kwargs")
    thought = more.get("reasoning_content") if isinstance(more, dict) else None
    said = {"reasoning_content": thought} if thought else {}
    return kept | {"role": _ROLES[value["type"]], "tool_calls": calls} | said


def _kind(path: Any) -> str:
    """Return the kind of message that a class of LangChain is, such as human."""
    name = str(path[-1]) if isinstance(path, list) and path else ""
    return name.removesuffix("Chunk").removesuffix("Message").lower()
