"""Gemini: `contents` of parts, the role `model`, and calls that are paired by order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    ToolCalls,
    call,
    called,
    calls_of,
    exchange,
    get,
    items_of,
    message,
    only,
    others,
    record,
    refuse_part,
    said,
    split_system,
    tool,
    turn,
)
from spmd_rl.errors import DataError

USED = ("contents", "systemInstruction", "system_instruction", "tools")
_EXCHANGE = ("request", "body", "response", "candidates")
_ALIASES = {"function_call": "functionCall", "function_response": "functionResponse"}
_BESIDE = {"thought", "thoughtSignature", "thought_signature"}


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request, response = exchange(row, "candidates")
    items = [*get(request, "contents", kind=list)]
    if isinstance(response, str):
        items.append({"role": "model", "parts": [{"text": response}]})
    elif response is not None:
        candidate = only(response, "candidates")
        items.append(get(candidate, "content", "response.candidates[0]", dict))
    messages: list[Json] = []
    system = request.get("systemInstruction", request.get("system_instruction"))
    if system is not None:
        content = {"parts": [{"text": system}]} if isinstance(system, str) else system
        messages += turn("system", _parts(content, ToolCalls(), "systemInstruction", "user"))
    calls = ToolCalls()
    for where, item in items_of({"contents": items}, "contents"):
        role = item.get("role", "user") if isinstance(item, dict) else ""
        if role not in ("user", "model", "function"):
            raise DataError(f"{where}.role", f"expected user or model, got {role!r}")
        parts = _parts(item, calls, where, role)
        marks = said(item, where) if role == "model" else {}
        messages += turn("assistant" if role == "model" else "user", parts, **marks)
    return record(row | request, USED + _EXCHANGE, messages, _read_tools(request))


def _part(part: Any, where: str) -> tuple[str, Any]:
    """Return kind and value of a part. Raises: DataError for other parts than text and calls."""
    if not isinstance(part, dict):
        raise DataError(where, f"expected an object, got {type(part).__name__}")
    kinds = [key for key in part if key not in _BESIDE]
    if len(kinds) != 1:
        raise DataError(where, f"expected one kind of part, got {', '.join(kinds) or 'none'}")
    kind = _ALIASES.get(kinds[0], kinds[0])
    if kind not in ("text", "functionCall", "functionResponse"):
        refuse_part(kind, where)
    get(part, kinds[0], where, str if kind == "text" else dict)
    return kind, part[kinds[0]]


def _parts(item: Json, calls: ToolCalls, where: str, role: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a turn in our form. Raises: DataError for those of other roles."""
    for place, part in items_of(item, "parts", where):
        kind, value = _part(part, place)
        if kind == "text":
            yield ("thought" if role == "model" and part.get("thought") else "text"), value
        elif (kind == "functionCall") != (role == "model"):
            raise DataError(place, f"a {kind} in a message of the {role}")
        elif kind == "functionCall":
            name, arguments = called(value, "args", place)
            yield "call", call(calls.add(name, value.get("id")), name, arguments)
        else:
            name, answer = get(value, "name", place), get(value, "response", place, dict)
            only_text = [*answer] == ["output"] and isinstance(answer["output"], str)
            text = answer["output"] if only_text else json.dumps(answer)
            call_id = calls.answer(place, name, value.get("id"))
            yield "result", message("tool", text, tool_call_id=call_id)


def _read_tools(request: Json) -> list[Json]:
    tools = []
    for where, group in items_of(request, "tools", needed=False):
        alias = "function_declarations"
        key = alias if isinstance(group, dict) and alias in group else "functionDeclarations"
        for item in get(group, key, where, list):
            schema = item.get("parametersJsonSchema") if isinstance(item, dict) else None
            name = get(item, "name", where)
            tools.append(tool(name, item.get("description"), item.get("parameters", schema)))
    return tools


def write(row: Json) -> Json:
    """Return a request. Raises: DataError."""
    system, messages = split_system(row)
    written: Json = {} if system is None else {"systemInstruction": {"parts": [{"text": system}]}}
    calls, items = ToolCalls(), []
    results: list[Json] = []
    for index, one in enumerate(messages):
        if one["role"] == "tool":
            if not results:
                items.append({"role": "user", "parts": results})
            results.append(_write_result(one, calls, f"messages[{index}]"))
            continue
        results = []
        role = "model" if one["role"] == "assistant" else "user"
        items.append({"role": role, "parts": _write_parts(one, calls)})
    written["contents"] = items
    if "tools" in row:
        declared = [item["function"] for item in row["tools"]]
        written["tools"] = [{"functionDeclarations": declared}]
    return others(row, written)


def _write_result(item: Json, calls: ToolCalls, where: str) -> Json:
    call_id = item["tool_call_id"]
    name = calls.name_of(call_id, where)
    oldest = calls.peek(name)
    named = {} if oldest and oldest[0] == call_id else {"id": call_id}
    calls.answer(where, name, call_id)
    answer = {"name": name, "response": {"output": item["content"]}, **named}
    return {"functionResponse": answer}


def _write_parts(item: Json, calls: ToolCalls) -> list[Json]:
    thought, text = item.get("reasoning_content"), item["content"]
    parts: list[Json] = [{"text": thought, "thought": True}] if thought else []
    parts += [{"text": text}] if text or "tool_calls" not in item else []
    for call_id, name, arguments in calls_of(item):
        named = {} if call_id == calls.next_id() else {"id": call_id}
        calls.add(name, call_id)
        parts.append({"functionCall": {"name": name, "args": arguments, **named}})
    return parts
