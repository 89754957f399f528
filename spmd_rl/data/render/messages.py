"""Chat messages and tools of a record, checked and brought into the form of chat templates.

That form is the one of Hugging Face: the content of a message is a text, and the arguments of a
tool call are an object. OpenAI writes arguments as JSON text, and content as a list of parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from spmd_rl.data.message_fields import plain_fields
from spmd_rl.errors import DataError

Message = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
_FORM = "expected a message with 'role' and 'content'"

# how the text of an object or a list of objects begins, as JSON or as Python prints it
_BEGINS = re.compile(r"""(array\(\s*)?\[?\s*\{\s*["']\w+["']\s*:""")
_HAS_ROLE = re.compile(r"""["'](role|from)["']\s*:""")


def written_messages(where: str, value: Any) -> list[Any] | None:
    """Return messages that are a list, or one as JSON text; None for any other value.

    What looks like messages must be JSON, and nothing else may follow it, or it is a text.
    Raises: DataError for messages in another notation, and for a single message as text.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        return None
    text = value.strip()
    if text == "[]":
        return []
    if not _BEGINS.match(text) or not _HAS_ROLE.search(text):
        return None
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        problem = f"this text looks like messages, but it is not JSON: {error}"
        raise DataError(where, problem) from error
    if end < len(text):
        return None
    if _is_message(found):
        raise DataError(where, "this text is one message: write a list of messages")
    is_chat = isinstance(found, list) and bool(found) and all(map(_is_message, found))
    return found if is_chat else None


def _is_message(value: Any) -> bool:
    """Whether a value has the keys of a message, in the form of OpenAI or of ShareGPT."""
    return isinstance(value, dict) and ("role" in value or value.keys() >= {"from", "value"})


def messages_of(where: str, value: Any) -> list[Message]:
    """Return checked chat messages, at least one. `where` names file, line and field.

    Fields that are null are left out, and so are tool calls that are none. `plain_fields` reads
    what says whether a message is learned, and its thought.
    Raises: DataError that names the message.
    """
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise DataError(where, "expected messages, each with 'role' and 'content'")
    return [_message(f"{where}[{number}]", message) for number, message in enumerate(value)]


def begins_with_system(messages: list[Message]) -> bool:
    """Whether the first message is a system prompt."""
    return messages[0]["role"] in SYSTEM_ROLES


def without(message: Message, fields: Collection[str]) -> Message:
    """Return a message without some fields."""
    return {key: value for key, value in message.items() if key not in fields}


def tools_of(where: str, value: Any) -> list[dict[str, Any]]:
    """Return tools, which are a list of objects or such a list as JSON text; null means none.

    Raises: DataError for anything else.
    """
    tools = parsed(where, value)
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(where, "expected tools: a list of objects, or one as JSON text")
    return tools


def object_of(where: str, value: Any) -> dict[str, Any]:
    """Return an object, which may be written as JSON text; null and empty texts mean no field.

    Raises: DataError for anything else.
    """
    found = parsed(where, value)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise DataError(where, "expected an object, or one as JSON text")
    return found


def _message(where: str, given: dict[Any, Any]) -> Message:
    message = plain_fields(where, given)
    if not isinstance(message.get("role"), str):
        raise DataError(where, _FORM)
    calls_where = f"{where}.tool_calls"
    if calls := parsed(calls_where, message.pop("tool_calls", None)):
        message["tool_calls"] = _tool_calls(calls_where, calls)
    if "content" not in message and not calls:
        raise DataError(where, _FORM)
    message["content"] = _content(f"{where}.content", message.get("content", ""))
    return message


def _content(where: str, content: Any) -> str:
    """Return the content as one text: parts, or their JSON text, are joined by line breaks."""
    if isinstance(content, str):
        return "\n".join(_texts_of_parts(content)) or content
    if not isinstance(content, list):
        raise DataError(where, f"expected a text or a list of text parts, got {content!r:.80}")
    texts = [part.get("text") for part in content if _is_text(part)]
    if len(texts) < len(content):
        raise DataError(where, "a part of a message must have type 'text' and a text")
    return "\n".join(texts)


def _texts_of_parts(text: str) -> list[str]:
    """Return the texts of parts that are written as JSON text; none of any other text."""
    if not _BEGINS.match(text.strip()):
        return []
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return []
    is_parts = isinstance(parts, list) and all(map(_is_text, parts))
    return [part["text"] for part in parts] if is_parts else []


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and type(part.get("text")) is str


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return the calls with their arguments as objects."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(where, "expected a list of objects")
    return [_tool_call(f"{where}[{number}]", call) for number, call in enumerate(calls)]


def _tool_call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _with_arguments(f"{where}.function", function)}
    return _with_arguments(where, call)


def _with_arguments(where: str, function: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise DataError(where, "a tool call needs the 'name' of a function")
    return function | {"arguments": object_of(f"{where}.arguments", function.get("arguments"))}


def parsed(where: str, value: Any) -> Any:
    """Return the value of JSON text, None of an empty text, and anything else as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"this text is not JSON: {error}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
