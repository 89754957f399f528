"""Raw text: `prompt` and `completion`, as one message of the user and one of the assistant.

Either may be a list of messages, as in files for TRL.
"""

from __future__ import annotations

from spmd_rl.data.logs import openai_chat
from spmd_rl.data.logs.form import Json, ToolCalls, functions, get, others, record

USED = ("prompt", "completion")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    items: list[Json] = []
    for key, role in zip(USED, ("user", "assistant"), strict=True):
        is_list = isinstance(row.get(key), list)
        items += row[key] if is_list else [{"role": role, "content": get(row, key, str, "")}]
    calls = ToolCalls()
    messages = [openai_chat.read_message(one, f"message {n}", calls) for n, one in enumerate(items)]
    return record(row, USED, messages, [tool for _, tool in functions(row)])


def write(row: Json) -> Json:
    """Return prompt and completion: texts, or messages where these say more. Raises: DataError."""
    written, reply = openai_chat.split(row)
    sides = {"user": written.pop("messages"), "assistant": [reply]}
    texts = [_text(messages, role) for role, messages in sides.items()]
    made = sides.values() if None in texts else texts
    return others(row, written | dict(zip(USED, made, strict=True)))


def _text(messages: list[Json], role: str) -> str | None:
    """Return the text of messages that are one text of this role; None of any others."""
    text: str = messages[0]["content"]
    return text if messages == [{"role": role, "content": text}] else None
