"""Our form of a conversation, and what the modules of all formats use to read and write it.

A record has `messages` and, where there are tools, `tools`, both in the chat form of OpenAI. The
`arguments` of a tool call are an object, as chat templates want them. Thoughts before an answer are
`reasoning_content`, and `weight` says whether a message is learned. All other keys of a record are
the user's own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from spmd_rl.data.message_fields import plain_fields, says_something, weight_of
from spmd_rl.data.render.messages import object_of
from spmd_rl.errors import DataError

Json = dict[str, Any]
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)  # what may stand in a header of HTTP
ROLES = ("system", "user", "assistant", "tool")
OURS = ("messages", "tools", "extra")  # keys of a record that have a meaning
_SAID = ("weight", "reasoning_content")
_MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *_SAID}


def get(row: Any, key: str, where: str = "", kind: type = str) -> Any:
    """Return `row[key]`. Raises: DataError unless `row` is an object that has it, of this type."""
    if not isinstance(row, dict):
        raise DataError(where, f"expected an object, got {type(row).__name__}")
    if key not in row:
        raise DataError(where, f"there is no {key!r}")
    if not isinstance(row[key], kind):
        raise DataError(
            f"{where}.{key}", f"expected {kind.__name__}, got {type(row[key]).__name__}"
        )
    return row[key]


def items_of(
    row: Any, key: str, where: str = "", *, needed: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield where each item of the list `row[key]` stands, and the item.

    Raises: DataError for what is no list, and for none where one is needed.
    """
    if needed or row.get(key):
        path = f"{where}.{key}" if where else key
        for number, item in enumerate(get(row, key, where, list)):
            yield f"{path}[{number}]", item


def only(response: Json, key: str) -> Any:
    """Return the one item of the list `response[key]`. Raises: DataError for more or less."""
    items = get(response, key, "response", list)
    if len(items) != 1:
        raise DataError(f"response.{key}", f"expected one, got {len(items)}")
    return items[0]


def exchange(row: Json, reply: str) -> tuple[Json, Any]:
    """Return the request of a row and the response to it, or None: a text, or an object.

    The request is the row itself, or its "request" or "body". The response stands beside it, and
    `reply` is the key that has what was answered, which may be in the row itself.
    """
    name = next((key for key in ("request", "body") if key in row), "")
    response = row.get("response", row if reply in row else None)
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    if not isinstance(response, (str, dict, type(None))):
        raise DataError("response", f"expected an object or a text, got {type(response).__name__}")
    return get(row, name, kind=dict) if name else row, response


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return text, or text parts joined. Raises: DataError for a part that is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(where, f"expected text or parts, got {type(content).__name__}")
    texts = []
    for place, part in items_of({where: content}, where):
        if get(part, "type", place) not in kinds:
            refuse_part(part["type"], place)
        texts.append(get(part, "text", place))
    return "".join(texts)


def refuse_part(kind: str, where: str) -> NoReturn:
    """Raises: DataError for a part that is neither text nor a tool call."""
    raise DataError(where, f"a part of type {kind!r}: only text and tool calls are converted")


def said(item: Json, where: str) -> Json:
    """Return weight and thought of a message, where it has them. Raises: DataError."""
    return {key: value for key, value in plain_fields(where, item).items() if key in _SAID}


def call(call_id: str, name: str, arguments: Json) -> Json:
    """Return a tool call in our form."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def called(given: Any, key: str, where: str) -> tuple[str, Json]:
    """Return name and arguments of a call, which `key` names. Raises: DataError."""
    name = get(given, "name", where)
    return name, object_of(f"{where}.{key}", given.get(key))


def split_system(row: Json) -> tuple[str | None, list[Json]]:
    """Return the system prompt of a record in our form, or None, and its other messages."""
    first, *rest = row["messages"]
    return (first["content"], rest) if first["role"] == "system" else (None, [first, *rest])


def calls_of(item: Json) -> Iterator[tuple[str, str, Json]]:
    """Yield id, name and arguments of each call of a message in our form."""
    for made in item.get("tool_calls", ()):
        yield made["id"], made["function"]["name"], made["function"]["arguments"]


def turn(role: str, parts: Iterable[tuple[str, Any]], **marks: Any) -> list[Json]:
    """Return the messages of a turn, of which each part has a kind and a value.

    Results of tools are messages of their own, and stand before the text.
    """
    found = defaultdict[str, list[Any]](list)
    for kind, value in parts:
        found[kind].append(value)
    text, results = "".join(found["text"]), found["result"]
    if role == "assistant":
        marks = {"reasoning_content": "".join(found["thought"])} | marks
        return [message(role, text, tool_calls=found["call"], **marks)]
    return results + ([message(role, text)] if found["text"] or not results else [])


def message(role: str, content: str, **others: Any) -> Json:
    """Return a message in our form, without those of `others` that are empty."""
    kept = {k: v for k, v in others.items() if says_something(v)}
    return {"role": role, "content": content} | kept


def functions(request: Json) -> Iterator[tuple[str, Any]]:
    """Yield where each tool stands and the tool, but for those of `other_tools`."""
    for where, item in items_of(request, "tools", needed=False):
        if not other_tools([item]):
            yield where, item


def other_tools(tools: list[Any]) -> tuple[str, ...]:
    """Return the names of tools that are no functions of the client, such as tools.web_search.

    The readers of requests leave them out.
    """
    kinds = [item.get("type") for item in tools if isinstance(item, dict)]
    named = (kind for kind in kinds if isinstance(kind, str) and _NAME.fullmatch(kind))
    return tuple(dict.fromkeys(f"tools.{kind}" for kind in named if kind != "function"))


def tool(name: str, description: Any, parameters: Any) -> Json:
    """Return a tool's definition in our form; None leaves a field out."""
    fields = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in fields.items() if v is not None}}


def record(row: Json, used: tuple[str, ...], messages: list[Json], tools: list[Json]) -> Json:
    """Return a record that also has the keys of `row` which its format gives no meaning to."""
    others = {k: v for k, v in row.items() if k not in used and k not in OURS}
    return {"messages": messages} | ({"tools": tools} if tools else {}) | others


def others(record: Json, written: Json) -> Json:
    """Return `written` with the record's own keys. Raises: DataError where both have a key."""
    kept = {key: value for key, value in record.items() if key not in OURS}
    if both := sorted(kept.keys() & written.keys()):
        raise DataError(both[0], "this key has another meaning in that format: rename it")
    return kept | written


def check(row: Json, where: str = "") -> None:
    """Raises: DataError unless this is a record in our form."""
    if not get(row, "messages", where, list):
        raise DataError(f"{where}.messages", "there is no message")
    for place, item in items_of(row, "messages", where):
        _check_message(item, place)
    for place, item in items_of(row, "tools", where, needed=row.get("tools") is not None):
        get(get(item, "function", place, dict), "name", f"{place}.function")


def _check_message(item: Any, where: str) -> None:
    if get(item, "role", where) not in ROLES:
        raise DataError(f"{where}.role", f"expected {', '.join(ROLES)}, got {item['role']!r}")
    get(item, "content", where)
    if unknown := sorted(item.keys() - _MESSAGE_KEYS):
        raise DataError(f"{where}.{unknown[0]}", "no such field of a message")
    weight_of(where, item)
    for key in {"reasoning_content", "name", "tool_call_id"} & item.keys():
        get(item, key, where)
    if item["role"] == "tool":
        get(item, "tool_call_id", where)
    for place, made in items_of(item, "tool_calls", where, needed="tool_calls" in item):
        function = get(made, "function", place, dict)
        get(made, "id", place)
        get(function, "name", f"{place}.function")
        get(function, "arguments", f"{place}.function", dict)


class ToolCalls:
    """Ids for calls that have none, and the calls that have no result yet.

    Calls without an id are paired with results by name, then by order.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []

    def next_id(self) -> str:
        """Return the id that the next call gets where it has none."""
        return f"call_{self._num_calls}"

    def add(self, name: str, call_id: str | None = None) -> str:
        """Note a call; return its id."""
        chosen = self.next_id() if call_id is None else call_id
        self._num_calls += 1
        self._open.append((chosen, name))
        return chosen

    def peek(self, name: str | None = None) -> tuple[str, str] | None:
        """Return id and name of the oldest open call, of this name if one is given."""
        return next((c for c in self._open if name in (None, c[1])), None)

    def answer(self, where: str, name: str | None = None, call_id: str | None = None) -> str:
        """Close a call; return its id. Raises: DataError when a result has no id and no call."""
        if call_id is None:
            found = self.peek(name)
            if found is None:
                raise DataError(where, "a tool's result without a call before it")
            call_id = found[0]
        self._open = [item for item in self._open if item[0] != call_id]
        return call_id

    def name_of(self, call_id: str, where: str) -> str:
        """Return the name of an open call. Raises: DataError when there is none."""
        for made, name in self._open:
            if made == call_id:
                return name
        raise DataError(where, f"no open tool call has the id {call_id!r}")
