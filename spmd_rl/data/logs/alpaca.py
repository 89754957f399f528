"""Alpaca: `instruction` and `output`, with an `input` below the instruction, and earlier turns."""

from __future__ import annotations

from spmd_rl.data.logs.form import Json, get, message, others, record
from spmd_rl.errors import DataError

USED = ("instruction", "input", "output", "system", "history")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    given = {"system": "", "history": [], "input": ""}
    given |= {key: row[key] for key in USED if row.get(key) is not None}
    messages: list[Json] = []
    if system := get(given, "system", str, ""):
        messages.append(message("system", system))
    for index, turn in enumerate(get(given, "history", list, "")):
        if not isinstance(turn, list) or [*map(type, turn)] != [str, str]:
            raise DataError(f"history[{index}]", "expected a question and its answer")
        messages += [message("user", turn[0]), message("assistant", turn[1])]
    parts = get(given, "instruction", str, ""), get(given, "input", str, "")
    messages.append(message("user", "\n".join(filter(None, parts))))
    messages.append(message("assistant", get(given, "output", str, "")))
    return record(row, USED, messages, [])


def write(row: Json) -> Json:
    """Return a row. Raises: DataError for what is no system prompt and pairs of turns."""
    messages, written = [*row["messages"]], {}
    if messages[0]["role"] == "system":
        written["system"] = messages.pop(0)["content"]
    texts = [one["content"] for one in messages]
    if [one["role"] for one in messages] != ["user", "assistant"] * (len(messages) // 2):
        raise DataError("messages", "expected messages of the user and the assistant in turns")
    if not texts:
        raise DataError("messages", "expected a question and its answer")
    *before, instruction, output = texts
    if before:
        written["history"] = [before[n : n + 2] for n in range(0, len(before), 2)]
    return others(row, {"instruction": instruction, "output": output, **written})
