"""OpenAI Responses: `instructions` and a list of items, with or without the `response`."""

from __future__ import annotations

import json
from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    arguments_of,
    call,
    get,
    message,
    others,
    record,
    refuse_part,
    text_of,
    tool,
)

USED = ("input", "instructions", "tools", "request", "response")
_TEXT = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request = get(row, "request", dict, "") if "request" in row else row
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    items = [*get({"input": items}, "input", list, "")]
    if isinstance(row.get("response"), dict) and "request" in row:
        items += get(row["response"], "output", list, "response")
    messages: list[Json] = []
    if request.get("instructions") is not None:
        messages.append(message("system", get(request, "instructions", str, "")))
    for index, item in enumerate(items):
        _read_item(item, messages, f"input[{index}]")
    tools = [_read_tool(item, f"tools[{i}]") for i, item in enumerate(request.get("tools") or [])]
    return record(row | request, USED, messages, tools)


def _read_item(item: Json, messages: list[Json], where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else get(item, "type", str, where)
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        role = get(item, "role", str, where)
        text = text_of(item.get("content"), f"{where}.content", _TEXT)
        is_thought = last is not None and last.keys() == {"role", "content", "reasoning_content"}
        if role == "assistant" and last is not None and is_thought and not last["content"]:
            last["content"] = text
            return
        messages.append(message("system" if role == "developer" else role, text))
    elif kind == "reasoning":
        texts = item.get("summary") or item.get("content") or []
        thought = text_of(texts, f"{where}.summary", _TEXT)
        messages.append(message("assistant", "", reasoning_content=thought))
    elif kind == "function_call":
        if last is None:
            last = message("assistant", "")
            messages.append(last)
        name = get(item, "name", str, where)
        made = call(
            get(item, "call_id", str, where), name, arguments_of(item.get("arguments"), where)
        )
        last.setdefault("tool_calls", []).append(made)
    elif kind == "function_call_output":
        text = text_of(item.get("output"), f"{where}.output", _TEXT)
        messages.append(message("tool", text, tool_call_id=get(item, "call_id", str, where)))
    else:
        refuse_part(str(kind), where)


def _read_tool(item: Any, where: str) -> Json:
    if get(item, "type", str, where) != "function":
        refuse_part(item["type"], where)
    return tool(get(item, "name", str, where), item.get("description"), item.get("parameters"))


def write(row: Json) -> Json:
    """Return a request. Raises: DataError."""
    messages, written = row["messages"], {}
    if messages[0]["role"] == "system":
        written["instructions"] = messages[0]["content"]
        messages = messages[1:]
    written["input"] = [item for one in messages for item in _write_message(one)]
    if "tools" in row:
        written["tools"] = [{"type": "function", **item["function"]} for item in row["tools"]]
    return others(row, written)


def _write_message(item: Json) -> list[Json]:
    if item["role"] == "tool":
        output = {"call_id": item["tool_call_id"], "output": item["content"]}
        return [{"type": "function_call_output", **output}]
    items: list[Json] = []
    if thought := item.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thought}]
        items.append({"type": "reasoning", "summary": summary})
    if item["content"] or "tool_calls" not in item:
        text = {"role": item["role"], "content": item["content"]}
        items.append({"type": "message", **text})
    for made in item.get("tool_calls", []):
        function = made["function"]
        items.append(
            {
                "type": "function_call",
                "call_id": made["id"],
                "name": function["name"],
                "arguments": json.dumps(function["arguments"]),
            }
        )
    return items
