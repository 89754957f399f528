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
from spmd_rl.data.logs.patch import apply, difference
from spmd_rl.data.render.messages import messages_of
from spmd_rl.errors import ConfigError, DataError


class Format(NamedTuple):
    """`read` makes our form of a row, `write` a row of our form. Both raise DataError."""

    read: Callable[[Json], Json]
    write: Callable[[Json], Json]


def _read_ours(row: Json) -> Json:
    return row | {"messages": messages_of("messages", row.get("messages"))}


def _ours(row: Json) -> Json:
    return row


OURS = "messages"
FORMATS = {
    OURS: Format(_read_ours, _ours),
    "openai": Format(openai_chat.read, openai_chat.write),
    "responses": Format(openai_responses.read, openai_responses.write),
    "anthropic": Format(anthropic.read, anthropic.write),
    "gemini": Format(gemini.read, gemini.write),
    "sharegpt": Format(sharegpt.read, sharegpt.write),
    "raw": Format(raw.read, raw.write),
}

NAMES = ", ".join(FORMATS)
_KEYS = {"input": "responses", "contents": "gemini", "conversations": "sharegpt"}
_KEYS |= {"completion": "raw"}
_BLOCKS = [f'"type": "{kind}"' for kind in ("tool_use", "tool_result", "thinking")]
_BLOCKS.append('"input_schema"')


def import_row(row: Json, name: str) -> Json:
    """Return a row of the named format in our form. Raises: DataError when it cannot be said."""
    try:
        made = FORMATS[name].read(row)
        check(made)
    except (AttributeError, TypeError) as error:  # a value of another type where one is optional
        raise DataError(name, f"not in this format: {error}") from error
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
    if extra is not None and not (isinstance(extra, dict) and "changes" in extra):
        raise DataError("extra", f"the format {name} has no place for this")
    bare = {key: value for key, value in row.items() if key != "extra"}
    written = FORMATS[name].write(bare)
    if extra and extra.get("format") == name and extra.get("of") == _digest(bare):
        written = dict(apply(written, extra["changes"]))
    if changes := difference(bare, FORMATS[name].read(written)):
        path = ".".join(str(key) for key in changes[0][0])
        raise DataError(path, f"the format {name} cannot say this")
    return written


def _digest(row: Json) -> str:
    text = json.dumps([row["messages"], row.get("tools")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def deduce(rows: Sequence[Json]) -> str:
    """Return the format of rows. Raises: ConfigError when none or several fit."""
    found = set().union(*(_marks(row) for row in rows))
    if found - {""}:
        found.discard("")  # plain messages, which are the same in all formats that have them
    if len(found) != 1:
        seen = f"it could be {' or '.join(sorted(found))}" if found else "no known format fits"
        raise ConfigError(f"the format is not clear, {seen}: name it with --from, {NAMES}")
    return found.pop() or "openai"


def log_format(row: Json) -> str:
    """Return the format of a row that no run reads before it is converted, or ""."""
    inner = row["request"] if isinstance(row.get("request"), dict) else row
    return next((_KEYS[key] for key in ("conversations", "contents") if key in inner), "")


def _marks(row: Json) -> set[str]:
    """Return the formats that a row speaks for; "" is any format with messages."""
    inner = row["request"] if isinstance(row.get("request"), dict) else row
    found = {name for key, name in _KEYS.items() if key in inner}
    if isinstance(inner.get("messages"), list):
        found.add(_chat_format(inner))
    return found


def _chat_format(row: Json) -> str:
    text = json.dumps(row)
    if "system" in row or any(mark in text for mark in _BLOCKS):
        return "anthropic"
    messages = [item for item in row["messages"] if isinstance(item, dict)]
    for made in (one for item in messages for one in item.get("tool_calls") or []):
        function = made.get("function") if isinstance(made, dict) else None
        if isinstance(function, dict):
            return OURS if isinstance(function.get("arguments"), dict) else "openai"
    return ""
