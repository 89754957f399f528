"""OpenAI chat completions: a request, or an object with `request` and `response`."""

from __future__ import annotations

import json
from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    ToolCalls,
    call,
    called,
    exchange,
    functions,
    get,
    items_of,
    message,
    only,
    others,
    record,
    said,
    text_of,
)
from spmd_rl.data.message_fields import plain_fields
from spmd_rl.errors import DataError

USED = ("messages", "tools", "request", "body", "response", "choices")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request, response = exchange(row, "choices")
    items = [*get(request, "messages", kind=list)]
    if response is not None:
        reply = _reply(response)
        # messages beside a response may have it already; a request ends with what it gave before
        if request is not row or not items or not _is_there(reply, items[-1]):
            items.append(reply)
    calls = ToolCalls()
    places = items_of({"messages": items}, "messages")
    messages = [read_message(item, where, calls) for where, item in places]
    return record(row | request, USED, messages, [item for _, item in functions(request)])


def _reply(response: Any) -> Json:
    """Return the message of a response: a text, a message, or one choice."""
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    if "role" in response:
        return dict(response)
    return dict(get(only(response, "choices"), "message", "response.choices[0]", dict))


def _is_there(reply: Json, last: Any) -> bool:
    """Whether messages end with this reply. Raises: DataError if they end with another one."""
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    if last.get("content") != reply.get("content"):
        raise DataError("response", "the messages end with another answer: take one of them out")
    return True


def read_message(item: Json, where: str, ids: ToolCalls) -> Json:
    """Return a message in our form. `ids` has the calls before it. Raises: DataError."""
    role = get(item, "role", where)
    for key in ("audio", "function_call", "refusal"):
        if item.get(key):
            raise DataError(f"{where}.{key}", "this is not converted")
    plain = plain_fields(where, item)
    thought = {"reasoning_content": item.get("thinking")}  # as Ollama calls it
    fields = {"name": item.get("name")} | thought | said(plain, where)
    if role == "tool":
        given = item.get("tool_call_ids") or [item.get("tool_call_id")]  # as SWE-agent calls it
        if len(given) != 1:
            raise DataError(f"{where}.tool_call_ids", f"expected one id, got {len(given)}")
        fields["tool_call_id"] = ids.answer(where, call_id=given[0])
    calls = items_of(item, "tool_calls", where, needed=False)
    fields["tool_calls"] = [_call(made, place, ids) for place, made in calls]
    text = text_of(plain.get("content"), f"{where}.content")
    return message("system" if role == "developer" else role, text, **fields)


def _call(made: Any, where: str, ids: ToolCalls) -> Json:
    name, arguments = called(get(made, "function", where, dict), "arguments", where)
    return call(ids.add(name, made.get("id")), name, arguments)


def write(row: Json) -> Json:
    """Return a request. Raises: DataError."""
    messages = []
    for item in row["messages"]:
        written = dict(item)
        if "tool_calls" in item:
            written["content"] = item["content"] or None
            written["tool_calls"] = [_write_call(made) for made in item["tool_calls"]]
        messages.append(written)
    tools = {"tools": row["tools"]} if "tools" in row else {}
    return others(row, {"messages": messages, **tools})


def _write_call(made: Json) -> Json:
    function = made["function"]
    return {**made, "function": {**function, "arguments": json.dumps(function["arguments"])}}
