"""All formats by name, and conversions that lose nothing.

What our form has no place for is kept under `extra`: the name of the format, the changes that
make the original of what we write, and a digest of the conversation to which they belong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from spmd_rl.data.logs import (
    anthropic,
    gemini,
    openai_chat,
    openai_responses,
    sharegpt,
    texts,
    traces,
)
from spmd_rl.data.logs.form import Json, check, get
from spmd_rl.data.render.messages import messages_of
from spmd_rl.errors import ConfigError, DataError

Change = list[Any]  # [path, value] sets a value; [path] removes one


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal; unlike in Python, 1 is neither 1.0 nor true."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def difference(have: Any, want: Any, path: tuple[str | int, ...] = ()) -> list[Change]:
    """Return the changes that make `want` of `have`."""
    if isinstance(have, dict) and isinstance(want, dict):
        changes: list[Change] = [[[*path, key]] for key in have if key not in want]
        for key, value in want.items():
            if key in have:
                changes += difference(have[key], value, (*path, key))
            else:
                changes.append([[*path, key], value])
        return changes
    if isinstance(have, list) and isinstance(want, list) and len(have) == len(want):
        return [
            change
            for index, (left, right) in enumerate(zip(have, want, strict=True))
            for change in difference(left, right, (*path, index))
        ]
    return [] if same(have, want) else [[[*path], want]]


def apply(value: Any, changes: list[Change]) -> Any:
    """Return a copy of `value` with the changes made. Raises: DataError where one does not fit."""
    root = [json.loads(json.dumps(value))]
    try:
        for change in changes:
            path, new = change[0], change[1:]
            place: Any = root
            keys: list[Any] = [0, *path]
            for key in keys[:-1]:
                place = place[key]
            last = keys[-1]
            if new:
                place[last] = new[0]
            else:
                del place[last]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError("extra", "what was kept of the original does not fit") from error
    return root[0]


class Format(NamedTuple):
    """`read` makes our form of a row, `write` a row of our form. Both raise DataError."""

    read: Callable[[Json], Json]
    write: Callable[[Json], Json]


def _read_trajectory(row: Json) -> Json:
    """Return our form of a run of SWE-agent, which has its messages under `history`."""
    history = {"messages": get(row, "history", kind=list)}
    return openai_chat.read({key: row[key] for key in row if key != "history"} | history)


OURS = "messages"
FORMATS = {
    OURS: Format(
        lambda row: row | {"messages": messages_of("messages", row.get("messages"))},
        lambda row: row,
    ),
    "openai": Format(openai_chat.read, openai_chat.write),
    "responses": Format(openai_responses.read, openai_responses.write),
    "anthropic": Format(anthropic.read, anthropic.write),
    "gemini": Format(gemini.read, gemini.write),
    "sharegpt": Format(sharegpt.read, sharegpt.write),
    "raw": Format(texts.read_raw, texts.write_raw),
}
# formats that are only read
READ_ONLY: dict[str, Callable[[Json], Json]] = {
    "alpaca": texts.read_alpaca,
    "trl": partial(traces.read, asked="prompt", answered="completion"),
    "langfuse": partial(traces.read, asked="input", answered="output"),
    "langsmith": partial(traces.read, asked="inputs", answered="outputs"),
    "swe-agent": _read_trajectory,
}
READ = (*FORMATS, *READ_ONLY)
_KEYS = {"contents": "gemini", "conversations": "sharegpt"}
_KEYS |= {"instruction": "alpaca", "trajectory": "swe-agent", "outputs": "langsmith"}
_ITEMS = {"message", "function_call", "reasoning"}  # types of what Responses returns
# keys of rows that hold no conversation, and what to do with them
_ADVICE = {
    ("preferred_output", "non_preferred_output"): "these are preference pairs: `spmd-rl run dpo` "
    "reads them with --prompts.chat_template=true --prompts.prompt_key=input.messages "
    "--prompts.chosen_key=preferred_output --prompts.rejected_key=non_preferred_output",
    ("chosen", "rejected"): "these are preference pairs, and `spmd-rl run dpo` reads pairs with a "
    "prompt: where both texts hold the whole dialogue, as in HH-RLHF, split it before the last "
    "answer into prompt, chosen and rejected",
    ("custom_id", "response"): "these are answers of a batch without their requests: write each "
    "beside the body of its request, by custom_id, as an object with request and response",
    ("sessionId", "message"): "a line of this log is one message, as Claude Code writes it: write "
    "the messages of a session as one record with messages, and give --from anthropic",
    ("source", "action"): "these are events of OpenHands, which are not the model's messages: let "
    "it log completions, and convert those",
}
_BLOCKS = [f'"type": "{kind}"' for kind in ("tool_use", "tool_result", "thinking")]
_BLOCKS.append('"input_schema"')


def import_row(row: Json, name: str) -> Json:
    """Return a row of the named format in our form. Raises: DataError when it cannot be said."""
    try:
        made = (READ_ONLY[name] if name in READ_ONLY else FORMATS[name].read)(row)
        check(made)
    except (AttributeError, TypeError) as error:  # a value of another type where one is optional
        raise DataError(name, f"not in this format: {error}") from error
    if name == OURS or name in READ_ONLY:
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
        advice = next(filter(None, map(_advice, rows)), "") if not found else ""
        raise ConfigError(
            advice or f"the format is not clear, {seen}: name it with --from, {', '.join(READ)}"
        )
    return found.pop() or "openai"


def hint(path: str, row: Json) -> str:
    """Return what to do with a file of rows that no run reads as they are, or ""."""
    found = _marks(row) - {"", OURS}
    if not found:
        return _advice(row)
    is_read = "messages" in row and not row.keys() & {"response", "choices"}
    if len(found) > 1 or (found == {"openai"} and is_read):
        return ""
    return f"`spmd-rl data convert {path} OUT` makes messages of {found.pop()} logs"


def _advice(row: Json) -> str:
    """Return what to do with a row that holds no conversation, if its form is known, or ""."""
    return next((text for keys, text in _ADVICE.items() if row.keys() >= {*keys}), "")


def _marks(row: Json) -> set[str]:
    """Return the formats that a row speaks for; "" is any format with messages."""
    inner = next((row[key] for key in ("request", "body") if isinstance(row.get(key), dict)), row)
    found = {name for key, name in _KEYS.items() if key in inner}
    if "input" in inner and "alpaca" not in found:
        found |= _formats_of_input(inner, is_row=inner is row)
    if "completion" in inner:
        is_text = isinstance(inner["completion"], str) and isinstance(inner.get("prompt"), str)
        found.add("raw" if is_text else "trl")
    if isinstance(inner.get("messages"), list):
        found.add(_chat_format(inner) or _reply_format(row))
    return found


def _formats_of_input(row: Json, *, is_row: bool) -> set[str]:
    """Return the formats of a row with `input`, which Responses has and many others.

    `is_row` says that the row is no request beside a response.
    """
    if "output" in row:
        items = row["output"] if isinstance(row["output"], list) else [{}]
        kinds = {one.get("type") for one in items if isinstance(one, dict)}
        return {"responses" if kinds & _ITEMS else "langfuse"}
    if not is_row or row.keys() & {"instructions", "model"} or isinstance(row["input"], list):
        return {"responses"}
    return {"responses", "langfuse"} if isinstance(row["input"], str) else set()


def _reply_format(row: Json) -> str:
    """Return the format of what was answered to plain messages, or ""."""
    response = row.get("response")
    if isinstance(response, dict) and isinstance(response.get("content"), list):
        return "anthropic"
    return "openai" if row.keys() & {"request", "body", "response", "choices"} else ""


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
