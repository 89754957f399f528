"""Anthropic messages: content blocks, `system` beside the messages, tools with `input_schema`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    call,
    called,
    calls_of,
    exchange,
    get,
    items_of,
    message,
    others,
    record,
    refuse_part,
    said,
    split_system,
    text_of,
    tool,
    turn,
)

USED = ("messages", "system", "tools", "request", "body", "response", "content")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request, response = exchange(row, "content")
    items = [*get(request, "messages", kind=list)]
    if response is not None:
        is_text = isinstance(response, str)
        content = response if is_text else get(response, "content", "response", list)
        items.append({"role": "assistant", "content": content})
    messages: list[Json] = []
    if request.get("system") is not None:
        messages.append(message("system", text_of(request["system"], "system")))
    for where, item in items_of({"messages": items}, "messages"):
        role = get(item, "role", where)
        content = item.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = _parts(role, {"content": blocks}, where)
        messages += turn(role, parts, **(said(item, where) if role == "assistant" else {}))
    tools = []
    for where, item in items_of(request, "tools", needed=False):
        schema = get(item, "input_schema", where, dict)
        tools.append(tool(get(item, "name", where), item.get("description"), schema))
    return record(row | request, USED, messages, tools)


def _parts(role: str, item: Json, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a turn but for its thoughts. Raises: DataError for those of others."""
    for place, block in items_of(item, "content", where):
        kind = get(block, "type", place)
        if kind == "text":
            yield "text", get(block, "text", place)
        elif kind == "tool_use" and role == "assistant":
            name, arguments = called(block, "input", place)
            yield "call", call(get(block, "id", place), name, arguments)
        elif kind == "tool_result" and role != "assistant":
            text = text_of(block.get("content"), f"{place}.content")
            used = get(block, "tool_use_id", place)
            yield "result", message("tool", text, tool_call_id=used)
        elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
            refuse_part(kind, place)


def write(row: Json) -> Json:
    """Return a request. Raises: DataError."""
    system, messages = split_system(row)
    written: Json = {} if system is None else {"system": system}
    items: list[Json] = []
    results: list[Json] = []  # blocks of the message that a user's text may still join
    for one in messages:
        text = one["content"]
        if one["role"] == "tool":
            if not results:
                items.append({"role": "user", "content": results})
            used = {"tool_use_id": one["tool_call_id"], "content": text}
            results.append({"type": "tool_result", **used})
            continue
        if one["role"] == "user" and results:
            results.append({"type": "text", "text": text})
        else:
            items.append({"role": one["role"], "content": _write_content(one)})
        results = []
    written["messages"] = items
    if "tools" in row:
        written["tools"] = [_write_tool(item["function"]) for item in row["tools"]]
    return others(row, written)


def _write_content(item: Json) -> str | list[Json]:
    text, thought = item["content"], item.get("reasoning_content")
    if not thought and "tool_calls" not in item:
        return str(text)
    blocks: list[Json] = [{"type": "thinking", "thinking": thought}] if thought else []
    blocks += [{"type": "text", "text": text}] if text else []
    for call_id, name, arguments in calls_of(item):
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
    return blocks


def _write_tool(function: Json) -> Json:
    fields = {k: v for k, v in function.items() if k != "parameters"}
    return {**fields, "input_schema": function.get("parameters", {})}
