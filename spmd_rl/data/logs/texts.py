"""Rows of two texts: raw ones with `prompt` and `completion`, and those of Alpaca and Dolly.

Alpaca has `instruction` and `output`, with an `input` below the instruction, and earlier turns. In
Dolly, the `input` is called `context`, and the `output` is called `response`.
"""

from __future__ import annotations

from typing import Any

from spmd_rl.data.logs.form import Json, get, items_of, message, others, record
from spmd_rl.errors import DataError

RAW = ("prompt", "completion")
_DOLLY = {"context": "input", "response": "output"}
ALPACA = ("instruction", "input", "output", "system", "history", *_DOLLY)


def read_raw(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    prompt, completion = (get(row, key) for key in RAW)
    return record(row, RAW, [message("user", prompt), message("assistant", completion)], [])


def write_raw(row: Json) -> Json:
    """Return prompt and completion. Raises: DataError for any other conversation."""
    if [item["role"] for item in row["messages"]] != ["user", "assistant"]:
        raise DataError("messages", "expected one message of the user and one of the assistant")
    prompt, completion = (item["content"] for item in row["messages"])
    return others(row, {"prompt": prompt, "completion": completion})


def read_alpaca(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    given = {"system": "", "history": [], "input": ""}
    given |= {_DOLLY.get(key, key): row[key] for key in ALPACA if row.get(key) is not None}
    system, question = get(given, "system"), get(given, "instruction")
    question = "\n".join(filter(None, (question, get(given, "input"))))
    messages = [message("system", system)] if system else []
    for where, turn in items_of(given, "history"):
        messages += _turn(turn, where)
    messages += _turn([question, get(given, "output")], "")
    return record(row, ALPACA, messages, [])


def _turn(texts: Any, where: str) -> list[Json]:
    if not isinstance(texts, list) or [*map(type, texts)] != [str, str]:
        raise DataError(where, "expected a question and its answer")
    return [message("user", texts[0]), message("assistant", texts[1])]
