"""Gemini: `contents` of parts, the role `model`, and calls that are paired by order."""

from __future__ import annotations

import json
from typing import Any

from spmd_rl.data.logs.form import (
    Json,
    ToolCalls,
    call,
    exchange,
    get,
    message,
    others,
    record,
    refuse_part,
    said,
    tool,
)
from spmd_rl.data.render.messages import object_of
from spmd_rl.errors import DataError

USED = ("contents", "systemInstruction", "system_instruction", "tools")
_EXCHANGE = ("request", "body", "response", "candidates")
_ALIASES = {"function_call": "functionCall", "function_response": "functionResponse"}
_BESIDE = {"thought", "thoughtSignature", "thought_signature"}


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    request, response = exchange(row, "candidates")
    items = [*get(request, "contents", list, "")]
    if isinstance(response, str):
        items.append({"role": "model", "parts": [{"text": response}]})
    elif response is not None:
        candidates = get(response, "candidates", list, "response")
        if len(candidates) != 1:
            raise DataError("response.candidates", f"expected one, got {len(candidates)}")
        items.append(get(candidates[0], "content", dict, "response.candidates[0]"))
    messages: list[Json] = []
    system = request.get("systemInstruction", request.get("system_instruction"))
    if system is not None:
        content = {"parts": [{"text": system}]} if isinstance(system, str) else system
        messages += _read_user("system", content, ToolCalls(), "systemInstruction")
    calls = ToolCalls()
    for index, item in enumerate(items):
        where = f"contents[{index}]"
        role = item.get("role", "user") if isinstance(item, dict) else ""
        if role not in ("user", "model", "function"):
            raise DataError(f"{where}.role", f"expected user or model, got {role!r}")
        if role == "model":
            messages.append(_read_model(item, calls, where))
        else:
            messages += _read_user("user", item, calls, where)
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
    get(part, kinds[0], str if kind == "text" else dict, where)
    return kind, part[kinds[0]]


def _read_model(item: Json, calls: ToolCalls, where: str) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    made: list[Json] = []
    for index, part in enumerate(get(item, "parts", list, where)):
        place = f"{where}.parts[{index}]"
        kind, value = _part(part, place)
        if kind == "text":
            (thoughts if part.get("thought") else texts).append(value)
        elif kind == "functionCall":
            name = get(value, "name", str, place)
            arguments = object_of(f"{place}.args", value.get("args"))
            made.append(call(calls.add(name, value.get("id")), name, arguments))
        else:
            raise DataError(place, "a tool's result in a message of the model")
    thought = "".join(thoughts)
    marks = {"reasoning_content": thought} | said(item, where)
    return message("assistant", "".join(texts), tool_calls=made, **marks)


def _read_user(role: str, item: Json, calls: ToolCalls, where: str) -> list[Json]:
    results, texts = [], []
    for index, part in enumerate(get(item, "parts", list, where)):
        place = f"{where}.parts[{index}]"
        kind, value = _part(part, place)
        if kind == "text":
            texts.append(value)
        elif kind == "functionResponse":
            name, answer = get(value, "name", str, place), get(value, "response", dict, place)
            only = [*answer] == ["output"] and isinstance(answer["output"], str)
            text = answer["output"] if only else json.dumps(answer)
            call_id = calls.answer(place, name, value.get("id"))
            results.append(message("tool", text, tool_call_id=call_id))
        else:
            raise DataError(place, "a tool call in a message of the user")
    return results + ([message(role, "".join(texts))] if texts or not results else [])


def _read_tools(request: Json) -> list[Json]:
    tools = []
    for index, group in enumerate(request.get("tools") or []):
        where = f"tools[{index}]"
        alias = "function_declarations"
        key = alias if isinstance(group, dict) and alias in group else "functionDeclarations"
        for item in get(group, key, list, where):
            schema = item.get("parametersJsonSchema") if isinstance(item, dict) else None
            name = get(item, "name", str, where)
            tools.append(tool(name, item.get("description"), item.get("parameters", schema)))
    return tools


def write(row: Json) -> Json:
    """Return a request. Raises: DataError."""
    messages: list[Json] = row["messages"]
    written: Json = {}
    if messages[0]["role"] == "system":
        written["systemInstruction"] = {"parts": [{"text": messages[0]["content"]}]}
        messages = messages[1:]
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
    for made in item.get("tool_calls", []):
        function = made["function"]
        named = {} if made["id"] == calls.next_id() else {"id": made["id"]}
        calls.add(function["name"], made["id"])
        used = {"name": function["name"], "args": function["arguments"], **named}
        parts.append({"functionCall": used})
    return parts
