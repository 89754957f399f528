"""OpenAI Responses: `instructions` and a list of items, with or without the `response`."""

from __future__ import annotations

import json

from spmd_rl.data.logs.form import (
    Json,
    call,
    called,
    calls_of,
    exchange,
    functions,
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
)
from spmd_rl.errors import DataError

USED = ("input", "instructions", "tools", "request", "body", "response", "output")
_TEXT = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request, response = exchange(row, "output")
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    items = [*get({"input": items}, "input", kind=list)]
    if isinstance(response, str):
        items.append({"role": "assistant", "content": response})
    elif response is not None:
        items += get(response, "output", "response", list)
    messages: list[Json] = []
    if request.get("instructions") is not None:
        messages.append(message("system", get(request, "instructions")))
    for where, item in items_of({"input": items}, "input"):
        if not isinstance(item, dict):
            raise DataError(where, f"expected an object, got {type(item).__name__}")
        _read_item(item, messages, where)
    tools = []
    for where, item in functions(request):
        if get(item, "type", where) != "function":
            refuse_part(item["type"], where)
        name = get(item, "name", where)
        tools.append(tool(name, item.get("description"), item.get("parameters")))
    return record(row | request, USED, messages, tools)


def _read_item(item: Json, messages: list[Json], where: str) -> None:
    """Add an item to the messages: a turn's thought, text and calls are one message.

    Items that differ in whether they are learned are not joined.
    """
    kind, marks = get({"type": "message"} | item, "type", where), said(item, where)
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    is_thought = "reasoning_content" in last and not (last["content"] or "tool_calls" in last)
    if kind == "message":
        role = get(item, "role", where)
        text = text_of(item.get("content"), f"{where}.content", _TEXT)
        if role == "assistant" and is_thought:
            last |= {"content": text} | marks
        else:
            messages.append(message("system" if role == "developer" else role, text, **marks))
    elif kind == "reasoning":
        texts = item.get("summary") or item.get("content") or []
        thought = text_of(texts, f"{where}.summary", _TEXT)
        if thought and is_thought:
            last["reasoning_content"] += thought
        elif thought:
            messages.append(message("assistant", "", reasoning_content=thought, **marks))
    elif kind == "function_call":
        if not last or not (is_thought or last.get("weight") == marks.get("weight")):
            last = message("assistant", "")
            messages.append(last)
        last |= marks
        last.setdefault("tool_calls", []).append(_read_call(item, where))
    elif kind == "function_call_output":
        text = text_of(item.get("output"), f"{where}.output", _TEXT)
        messages.append(message("tool", text, tool_call_id=get(item, "call_id", where)))
    else:
        refuse_part(kind, where)


def _read_call(item: Json, where: str) -> Json:
    name, arguments = called(item, "arguments", where)
    return call(get(item, "call_id", where), name, arguments)


def write(row: Json) -> Json:
    """Return a request. Raises: DataError."""
    system, messages = split_system(row)
    written: Json = {} if system is None else {"instructions": system}
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
        items.append({"type": "message", "role": item["role"], "content": item["content"]})
    for call_id, name, arguments in calls_of(item):
        made = {"call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
        items.append({"type": "function_call", **made})
    return items
