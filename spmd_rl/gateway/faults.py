"""Faults of replies: calls that a client cannot answer, so that it may raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from spmd_rl.data.render.messages import Message

# a call that is none; or no room for another reply
Fault = Literal["", "call", "context"]
_TYPES: dict[Any, Any] = {
    "string": str,
    "integer": (int, float),
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def fault_of(reply: Message, tools: Sequence[Mapping[str, Any]], call_tag: str) -> Fault:
    """Return "call" for a reply that calls no tool of these, that gives one other arguments than it
    takes, or that begins a call and makes none.
    """
    if not tools:
        return ""
    offered = {one["function"]["name"]: one["function"].get("parameters") for one in tools}
    for call in reply.get("tool_calls", ()):
        made = call["function"]
        if made["name"] not in offered or not _fit(made["arguments"], offered[made["name"]]):
            return "call"
    return "call" if call_tag and call_tag in reply["content"] else ""


def _fit(arguments: Mapping[str, Any], schema: Any) -> bool:
    """Return whether arguments have the names and the plain types of a JSON schema."""
    known, required = _part(schema, "properties", dict), _part(schema, "required", list)
    takes_others = not known or schema.get("additionalProperties")
    if not takes_others and not arguments.keys() <= known.keys():
        return False
    if not all(name in arguments for name in required):
        return False
    return all(_is_of(value, known.get(name)) for name, value in arguments.items())


def _is_of(value: Any, schema: Any) -> bool:
    """Return whether a value has the plain type that its schema names, if it names one."""
    named = _part(schema, "type", str)
    if named not in _TYPES:
        return True
    return isinstance(value, _TYPES[named]) and (named == "boolean") == isinstance(value, bool)


def _part(schema: Any, name: str, kind: type) -> Any:
    """Return what a schema has under a name; an empty value for what it should not have there."""
    found = schema.get(name) if isinstance(schema, Mapping) else None
    return found if isinstance(found, kind) else kind()
