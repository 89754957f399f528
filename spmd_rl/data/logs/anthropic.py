"""Anthropic messages: content blocks, `system` beside the messages, tools with `input_schema`."""

from __future__ import annotations

from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    call,
    exchange,
    get,
    message,
    others,
    record,
    refuse_part,
    said,
    text_of,
    tool,
)
from spmd_rl.data.render.messages import object_of

USED = ("messages", "system", "tools", "request", "body", "response", "content")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request, response = exchange(row, "content")
    items = [*get(request, "messages", list, "")]
    if response is not None:
        is_text = isinstance(response, str)
        content = response if is_text else get(response, "content", list, "response")
        items.append({"role": "assistant", "content": content})
    messages: list[Json] = []
    if request.get("system") is not None:
        messages.append(message("system", text_of(request["system"], "system")))
    for index, item in enumerate(items):
        where = f"messages[{index}]"
        role = get(item, "role", str, where)
        content = item.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        blocks = get({"content": blocks}, "content", list, where)
        if role == "assistant":
            messages.append(_read_assistant(item, blocks, where))
        else:
            messages += _read_user(role, blocks, f"{where}.content")
    tools = [_read_tool(item, f"tools[{i}]") for i, item in enumerate(request.get("tools") or [])]
    return record(row | request, USED, messages, tools)


def _read_user(role: str, blocks: list[Any], where: str) -> list[Json]:
    results, texts = [], []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if get(block, "type", str, place) == "tool_result":
            text = text_of(block.get("content"), f"{place}.content")
            used = get(block, "tool_use_id", str, place)
            results.append(message("tool", text, tool_call_id=used))
        else:
            texts.append(text_of([block], place))
    return results + ([message(role, "".join(texts))] if texts or not results else [])


def _read_assistant(item: Json, blocks: list[Any], where: str) -> Json:
    texts, calls = [], []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        kind = get(block, "type", str, place)
        if kind == "text":
            texts.append(get(block, "text", str, place))
        elif kind == "tool_use":
            name = get(block, "name", str, place)
            arguments = object_of(f"{place}.input", block.get("input"))
            calls.append(call(get(block, "id", str, place), name, arguments))
        elif kind not in ("thinking", "redacted_thinking"):
            refuse_part(kind, place)
    return message("assistant", "".join(texts), tool_calls=calls, **said(item, where))


def _read_tool(item: Any, where: str) -> Json:
    schema = get(item, "input_schema", dict, where)
    return tool(get(item, "name", str, where), item.get("description"), schema)


def write(row: Json) -> Json:
    """Return a request. Raises: DataError."""
    messages, written = row["messages"], {}
    if messages[0]["role"] == "system":
        written["system"] = messages[0]["content"]
        messages = messages[1:]
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
    for made in item.get("tool_calls", []):
        function = made["function"]
        used = {"id": made["id"], "name": function["name"], "input": function["arguments"]}
        blocks.append({"type": "tool_use", **used})
    return blocks


def _write_tool(function: Json) -> Json:
    fields = {k: v for k, v in function.items() if k != "parameters"}
    return {**fields, "input_schema": function.get("parameters", {})}
