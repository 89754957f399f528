"""Raw text: `prompt` and `completion`, as one message of the user and one of the assistant."""

from __future__ import annotations

from spmd_rl.data.logs.form import Json, get, message, others, record
from spmd_rl.errors import DataError

USED = ("prompt", "completion")


def read(row: Json) -> Json:
    """Return our form. Raises: DataError."""
    prompt, completion = (get(row, key, str, "") for key in USED)
    return record(row, USED, [message("user", prompt), message("assistant", completion)], [])


def write(row: Json) -> Json:
    """Return prompt and completion. Raises: DataError for any other conversation."""
    if [item["role"] for item in row["messages"]] != ["user", "assistant"]:
        raise DataError("messages", "expected one message of the user and one of the assistant")
    prompt, completion = (item["content"] for item in row["messages"])
    return others(row, {"prompt": prompt, "completion": completion})
