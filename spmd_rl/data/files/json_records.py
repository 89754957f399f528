"""Records of a .json file: a list of objects, an object that has one such list, or one record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd_rl.data.files.record import DataRecord, short
from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import parse_json

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r,:]*")  # in JSON that has been parsed, between two values


def read_json(file: Path, content: bytes) -> list[DataRecord | DataError]:
    """Return the objects of the list, each with the line on which it begins.

    An object that has messages, or no list at all, is the only record itself. An error stands in
    place of anything in the list that is no object.
    Raises: DataError for other JSON.
    """
    value = parse_json(str(file), content)
    if isinstance(value, dict) and _is_record(value):
        return [DataRecord(f"{file}:1, record 1", value)]
    key = _list_key(file, value)
    items = value if key is None else value[key]
    text = content.decode("utf-8-sig")
    records: list[DataRecord | DataError] = []
    for number, (line, item) in enumerate(
        zip(_lines(text, key, len(items)), items, strict=True), start=1
    ):
        where = f"{file}:{line}, record {number}"
        if isinstance(item, dict):
            records.append(DataRecord(where, item))
        else:
            records.append(DataError(where, f"expected a JSON object, got {short(item)}"))
    return records


def _is_record(value: dict[str, Any]) -> bool:
    lists = [item for item in value.values() if isinstance(item, list)]
    first = (item[0] for item in lists if item)
    return not lists or any(
        isinstance(one, dict) and one.keys() & {"role", "from"} for one in first
    )


def _list_key(file: Path, value: Any) -> str | None:
    """Return the key of the only list, or None when the value itself is the list."""
    if isinstance(value, list):
        return None
    if not isinstance(value, dict):
        raise DataError(str(file), f"expected a list of objects, got {short(value)}")
    keys = [key for key, item in value.items() if isinstance(item, list)]
    if len(keys) != 1:
        found = ", ".join(map(repr, keys)) or "none"
        raise DataError(
            str(file),
            f"expected a list of objects, or an object with one list (its lists: {found}); "
            "a file with an object a line is called .jsonl",
        )
    return keys[0]


def _lines(text: str, key: str | None, num_items: int) -> Iterator[int]:
    """Yield the line on which each item of the list begins; `text` has been parsed."""
    position = _after_space(text, 0) + 1  # of the first bracket
    if key is not None:
        position = _list_start(text, key, position) + 1
    line, counted = 1, 0
    for _ in range(num_items):
        position = _after_space(text, position)
        line, counted = line + text.count("\n", counted, position), position
        yield line
        _, position = _DECODER.raw_decode(text, position)


def _list_start(text: str, wanted: str, position: int) -> int:
    """Return where the list under a key begins. Of equal keys, JSON keeps the last."""
    start = position
    while text[position := _after_space(text, position)] != "}":
        key, position = _DECODER.raw_decode(text, position)
        begin = _after_space(text, position)
        start = begin if key == wanted else start
        _, position = _DECODER.raw_decode(text, begin)
    return start


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position
