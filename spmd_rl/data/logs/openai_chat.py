"""OpenAI chat completions: a request, or an object with `request` and `response`."""

from __future__ import annotations

import json

from spmd_rl.data.logs.form import Json, arguments_of, call, get, message, others, record, text_of
from spmd_rl.errors import DataError

USED = ("messages", "tools", "request", "response")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request = get(row, "request", dict, "") if "request" in row else row
    items = [*get(request, "messages", list, "")]
    if isinstance(row.get("response"), dict) and "request" in row:
        choices = get(row["response"], "choices", list, "response")
        if len(choices) != 1:
            raise DataError("response.choices", f"expected one choice, got {len(choices)}")
        items.append(get(choices[0], "message", dict, "response.choices[0]"))
    messages = [_read_message(item, f"messages[{i}]") for i, item in enumerate(items)]
    return record(row | request, USED, messages, request.get("tools") or [])


def _read_message(item: Json, where: str) -> Json:
    role = get(item, "role", str, where)
    for key in ("audio", "function_call", "refusal"):
        if item.get(key):
            raise DataError(f"{where}.{key}", "this is not converted")
    calls = []
    for number, made in enumerate(item.get("tool_calls") or []):
        place = f"{where}.tool_calls[{number}]"
        function = get(made, "function", dict, place)
        arguments = arguments_of(function.get("arguments"), place)
        calls.append(
            call(get(made, "id", str, place), get(function, "name", str, place), arguments)
        )
    fields = {key: item.get(key) for key in ("reasoning_content", "tool_call_id", "name")}
    return message(
        "system" if role == "developer" else role,
        text_of(item.get("content"), f"{where}.content"),
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
