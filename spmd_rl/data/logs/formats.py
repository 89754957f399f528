"""All formats by name, and conversions that lose nothing.

What our form has no place for is kept under `extra`: the name of the format, the changes that
make the original of what we write, and a digest of the conversation to which they belong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spmd_rl.data.logs import (
    anthropic,
    gemini,
    openai_chat,
    openai_responses,
    raw,
    sharegpt,
)
from spmd_rl.data.logs.form import Json, check
from spmd_rl.data.logs.patch import apply, difference, same
from spmd_rl.errors import ConfigError, DataError


class Format(NamedTuple):
    """`read` makes our form of a row, `write` a row of our form. Both raise DataError."""

    read: Callable[[Json], Json]
    write: Callable[[Json], Json]


def _ours(row: Json) -> Json:
    check(row)
    return row


OURS = "messages"
FORMATS = {
    OURS: Format(_ours, _ours),
    "openai": Format(openai_chat.read, openai_chat.write),
    "responses": Format(openai_responses.read, openai_responses.write),
    "anthropic": Format(anthropic.read, anthropic.write),
    "gemini": Format(gemini.read, gemini.write),
    "sharegpt": Format(sharegpt.read, sharegpt.write),
    "raw": Format(raw.read, raw.write),
}


def import_row(row: Json, name: str) -> Json:
    """Return a row of the named format in our form. Raises: DataError when it cannot be said."""
    made = FORMATS[name].read(row)
    check(made)
    if name == OURS:
        return made
    changes = difference(FORMATS[name].write(made), row)
    if not changes:
        return made
    return made | {"extra": {"format": name, "of": _digest(made), "changes": changes}}


def export_row(row: Json, name: str) -> Json:
    """Return a record of ours as a row of the named format.

    Raises: DataError when the format cannot say it, and names what would change.
    """
    check(row)
    if name == OURS:
        return row
    extra = row.get("extra")
    bare = {key: value for key, value in row.items() if key != "extra"}
    written = FORMATS[name].write(bare)
    if changes := difference(bare, FORMATS[name].read(written)):
        path = ".".join(str(key) for key in changes[0][0])
        raise DataError(path, f"the format {name} cannot say this")
    if isinstance(extra, dict) and extra.get("format") == name and extra.get("of") == _digest(bare):
        return dict(apply(written, extra["changes"]))
    if extra is not None and not (isinstance(extra, dict) and "changes" in extra):
        raise DataError("extra", f"the format {name} has no place for this")
    return written


def _digest(row: Json) -> str:
    text = json.dumps([row["messages"], row.get("tools")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def deduce(rows: Sequence[Json]) -> str:
    """Return the format of rows. Raises: ConfigError when none or several fit."""
    found = set().union(*(_marks(row) for row in rows))
    if found == {"openai", OURS} or not found:
        found = {name for name in (OURS, "openai") if _reads_all(rows, name)} if found else set()
    if len(found) != 1:
        seen = f"it could be {' or '.join(sorted(found))}" if found else "no known format fits"
        raise ConfigError(
            f"the format is not clear, {seen}: name it with --from {'|'.join(FORMATS)}"
        )
    return found.pop()


def _reads_all(rows: Sequence[Json], name: str) -> bool:
    try:
        return all(same(export_row(import_row(row, name), name), row) for row in rows)
    except DataError:
        return False


def _marks(row: Json) -> set[str]:
    """Return the formats that the keys of a row speak for."""
    inner = row["request"] if isinstance(row.get("request"), dict) else row
    keys = {
        "responses": "input",
        "gemini": "contents",
        "sharegpt": "conversations",
        "raw": "completion",
    }
    found = {name for name, key in keys.items() if key in inner}
    if "messages" in inner:
        found.add(_chat_format(inner))
    return found


def _chat_format(row: Json) -> str:
    """Return which of the formats with `messages` this is; plain text is the same in all."""
    text = json.dumps(row)
    marks = ('"type": "tool_use"', '"type": "tool_result"', '"type": "thinking"', '"input_schema"')
    if "system" in row or any(mark in text for mark in marks):
        return "anthropic"
    messages = row["messages"] if isinstance(row["messages"], list) else []
    calls = [
        made
        for item in messages
        if isinstance(item, dict)
        for made in item.get("tool_calls") or []
        if isinstance(made, dict) and isinstance(made.get("function"), dict)
    ]
    is_ours = any(isinstance(made["function"].get("arguments"), dict) for made in calls)
    return OURS if is_ours else "openai"
