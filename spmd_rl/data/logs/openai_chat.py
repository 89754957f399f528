"""OpenAI chat completions: a request, or an object with `request` and `response`."""

from __future__ import annotations

import json
from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    call,
    exchange,
    functions,
    get,
    message,
    others,
    record,
    said,
    text_of,
)
from spmd_rl.data.message_fields import plain_fields
from spmd_rl.data.render.messages import object_of
from spmd_rl.errors import DataError

USED = ("messages", "tools", "request", "body", "response", "choices")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request, response = exchange(row, "choices")
    items = [*get(request, "messages", list, "")]
    if response is not None:
        items.append(reply_of(response, "response"))
    messages = [read_message(item, f"messages[{i}]") for i, item in enumerate(items)]
    return record(row | request, USED, messages, [item for _, item in functions(request)])


def reply_of(response: Any, where: str) -> Json:
    """Return the message of a response, which is a text, a message, or has one choice."""
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    if "role" in response:
        return dict(response)
    choices = get(response, "choices", list, where)
    if len(choices) != 1:
        raise DataError(f"{where}.choices", f"expected one choice, got {len(choices)}")
    return dict(get(choices[0], "message", dict, f"{where}.choices[0]"))


def read_message(item: Json, where: str) -> Json:
    """Return a message in our form. Raises: DataError."""
    role = get(item, "role", str, where)
    for key in ("audio", "function_call", "refusal"):
        if item.get(key):
            raise DataError(f"{where}.{key}", "this is not converted")
    calls = []
    for number, made in enumerate(item.get("tool_calls") or []):
        place = f"{where}.tool_calls[{number}]"
        function = get(made, "function", dict, place)
        arguments = object_of(f"{place}.arguments", function.get("arguments"))
        calls.append(
            call(get(made, "id", str, place), get(function, "name", str, place), arguments)
        )
    plain = plain_fields(where, item)
    thought = {"reasoning_content": item.get("thinking")}  # as Ollama calls it
    fields = {key: item.get(key) for key in ("tool_call_id", "name")} | thought | said(plain, where)
    return message(
        "system" if role == "developer" else role,
        text_of(plain.get("content"), f"{where}.content"),
        tool_calls=calls,
        **fields,
    )


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
