"""Text of a command-line setting to its value, by the type of its field.

A table may be written as JSON as well as TOML: `{"a": [1, 2]}` is `{a = [1, 2]}`.
"""

from __future__ import annotations

import json
import tomllib
import typing
from typing import Any, Literal

from spmd_rl.config.dump import toml_text

_TRUTH = {"True": True, "False": False}


def parse(text: str, hint: Any) -> Any:
    """Return the value that `text` spells, for a field of type `hint`.

    Text that spells none is returned as it is, so that the type check can refuse it. A field of any
    type takes the truth values of Python too.
    """
    if hint is str or (typing.get_origin(hint) is Literal and text in typing.get_args(hint)):
        return str(text)
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), str(text))
    if hint is Any and text in _TRUTH:
        return _TRUTH[text]
    if hint is float:
        try:
            return float(text)
        except ValueError:
            return str(text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # not TOML, or a number of thousands of digits
        return _parse_json(text)


def _parse_json(text: str) -> Any:
    """Return the value that `text` spells in JSON, or the text itself where TOML cannot hold it.

    A run keeps its config as TOML, which has no null.
    """
    try:
        value = json.loads(text)
        in_toml = tomllib.loads(f"value = {toml_text(value)}")["value"]
    except (ValueError, TypeError, RecursionError):
        return str(text)
    return value if in_toml == value else str(text)
