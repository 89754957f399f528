"""Alpaca: `instruction` and `output`, with an `input` below the instruction, and earlier turns.

In Dolly, the `input` is called `context`, and the `output` is called `response`.
"""

from __future__ import annotations

from typing import Any

from spmd_rl.data.logs.form import Json, get, message, others, record
from spmd_rl.errors import DataError

_DOLLY = {"context": "input", "response": "output"}
USED = ("instruction", "input", "output", "system", "history", *_DOLLY)


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    given = {"system": "", "history": [], "input": ""}
    given |= {_DOLLY.get(key, key): row[key] for key in USED if row.get(key) is not None}
    system, question = get(given, "system", str, ""), get(given, "instruction", str, "")
    if below := get(given, "input", str, ""):
        question = f"{question}\n{below}" if question else below
    messages = [message("system", system)] if system else []
    for index, turn in enumerate(get(given, "history", list, "")):
        messages += _turn(turn, f"history[{index}]")
    messages += _turn([question, get(given, "output", str, "")], "")
    return record(row, USED, messages, [])


def _turn(texts: Any, where: str) -> list[Json]:
    if not isinstance(texts, list) or [*map(type, texts)] != [str, str]:
        raise DataError(where, "expected a question and its answer")
    return [message("user", texts[0]), message("assistant", texts[1])]


def write(row: Json) -> Json:
    """Return a row. Raises: DataError for what is no system prompt and pairs of turns."""
    roles = [one["role"] for one in row["messages"]]
    texts = [one["content"] for one in row["messages"]]
    is_begun = roles[0] == "system"
    if roles[is_begun:] != ["user", "assistant"] * max(1, len(roles) // 2):
        raise DataError("messages", "expected messages of the user and the assistant in turns")
    history = [texts[n : n + 2] for n in range(is_begun, len(texts) - 2, 2)]
    written = {"system": texts[0]} if is_begun else {}
    written |= {"history": history} if history else {}
    return others(row, {"instruction": texts[-2], "output": texts[-1], **written})
