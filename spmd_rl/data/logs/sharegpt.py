"""ShareGPT: `conversations` with `from` and `value`; calls and results have turns of their own."""

from __future__ import annotations

import json
from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    ToolCalls,
    call,
    called,
    get,
    items_of,
    message,
    others,
    record,
    said,
)
from spmd_rl.data.message_fields import weight_of
from spmd_rl.data.render.messages import parsed, tools_of
from spmd_rl.errors import DataError

USED = ("conversations", "system", "tools")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
_NAMES = {"user": "human", "assistant": "gpt", "system": "system"}


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    messages: list[Json] = []
    if row.get("system"):
        messages.append(message("system", get(row, "system")))
    calls = ToolCalls()
    for where, turn in items_of(row, "conversations"):
        _read_turn(turn, messages, calls, where)
    return record(row, USED, messages, _read_tools(row.get("tools")))


def _read_turn(turn: Any, messages: list[Json], calls: ToolCalls, where: str) -> None:
    speaker, value = get(turn, "from", where), get(turn, "value", where)
    if speaker == "function_call":
        made = _read_calls(value, calls, f"{where}.value")
        last, marks = messages[-1] if messages else {}, said(turn, where)
        is_same = last.get("weight") == marks.get("weight") and "reasoning_content" not in marks
        if last.get("role") == "assistant" and "tool_calls" not in last and is_same:
            last["tool_calls"] = made
        else:
            messages.append(message("assistant", "", tool_calls=made, **marks))
    elif speaker not in _ROLES:
        raise DataError(f"{where}.from", f"unknown speaker {speaker!r}")
    elif _ROLES[speaker] == "tool":
        marks = {"weight": weight_of(where, turn)}
        messages.append(message("tool", value, tool_call_id=calls.answer(where), **marks))
    else:
        messages.append(message(_ROLES[speaker], value, **said(turn, where)))


def _read_calls(text: str, calls: ToolCalls, where: str) -> list[Json]:
    value = parsed(where, text)
    made = []
    for item in value if isinstance(value, list) else [value]:
        name, arguments = called(item, "arguments", where)
        made.append(call(calls.add(name), name, arguments))
    if not made:
        raise DataError(where, "there is no call")
    return made


def _read_tools(given: Any) -> list[Json]:
    tools = []
    for where, item in items_of({"tools": tools_of("tools", given or None)}, "tools"):
        get(item, "function" if "function" in item else "name", where, object)
        tools.append(item if "function" in item else {"type": "function", "function": item})
    return tools


def write(row: Json) -> Json:
    """Return a conversation. Raises: DataError."""
    turns: list[Json] = []
    for item in row["messages"]:
        mark = {"weight": item["weight"]} if "weight" in item else {}
        if item["role"] == "tool":
            turns.append({"from": "observation", "value": item["content"], **mark})
            continue
        if item["content"] or "tool_calls" not in item:
            turns.append({"from": _NAMES[item["role"]], "value": item["content"], **mark})
        if made := [one["function"] for one in item.get("tool_calls", [])]:
            value = json.dumps(made[0] if len(made) == 1 else made)
            turns.append({"from": "function_call", "value": value, **mark})
    tools = {"tools": json.dumps(row["tools"])} if "tools" in row else {}
    return others(row, {"conversations": turns, **tools})
