"""A setting's value as text: as the command line has it, and as TOML.

JSON is read too, for tables, which many know better in that form: `{"a": [1, 2]}` is `{a = [1,
2]}`.
"""

from __future__ import annotations

import json
import tomllib
import typing
from collections.abc import Iterator
from typing import Any, Literal


def parse(text: str, hint: Any) -> Any:
    """The value that `text` spells, for a field of type `hint`.

    It is the text itself where that spells none, so that the type check can refuse it.
    """
    if hint is str or (typing.get_origin(hint) is Literal and text in typing.get_args(hint)):
        return str(text)
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), str(text))
    if hint is float:
        try:
            return float(text)
        except ValueError:
            return str(text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or a number of thousands of digits
        return _parse_json(text)


def _parse_json(text: str) -> Any:
    """The value that `text` spells in JSON if TOML, in which a run keeps its config, can hold it:
    it has no null.
    """
    try:
        value = json.loads(text)
        kept = tomllib.loads(f"value = {toml_value(value)}")["value"]
    except (ValueError, TypeError, RecursionError):
        return str(text)
    return value if kept == value else str(text)


def toml_lines(table: dict[str, Any], path: str) -> Iterator[str]:
    """The lines of `table`, which stands at the dotted key `path` of its file."""
    for name, value in table.items():
        if not isinstance(value, dict) and value is not None:
            yield f"{_toml_key(name)} = {toml_value(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            inner = f"{path}.{_toml_key(name)}" if path else _toml_key(name)
            yield from ("", f"[{inner}]")
            yield from toml_lines(value, inner)


def _toml_key(name: str) -> str:
    return (
        name
        if name.replace("_", "").replace("-", "").isalnum() and name.isascii()
        else toml_value(name)
    )


def toml_value(value: Any) -> str:
    """A plain value on one line. Keys of a table that are None are left out."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None
            )
            + "}"
        )
    return str(value) if isinstance(value, int) else repr(float(value))
