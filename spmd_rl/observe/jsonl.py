"""JSON files that users may write or damage: errors name the file, the line and the problem."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd_rl.errors import DataError

_MAX_DIGITS = 308  # of an integer that a float can hold


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1.

    Only a newline ends a line. `str.splitlines` would also split at U+2028 and others, which a JSON
    string may hold.
    """
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def parse_json(where: str, content: bytes, **hooks: Any) -> Any:
    """Return the value of a line or file; `hooks` are those of `json.loads`. Raises: DataError."""
    try:
        # given bytes, json.loads would also accept UTF-16
        return json.loads(content.decode("utf-8-sig"), **hooks)
    except UnicodeDecodeError as error:
        raise DataError(where, f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise DataError(where, f"not valid JSON: {_problem(error)}") from error
    except RecursionError as error:
        raise DataError(where, "not valid JSON: it is nested too deeply") from error
    except ValueError as error:  # Python refuses integers of thousands of digits
        raise DataError(where, f"not valid JSON: {str(error).partition(';')[0]}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises: DataError, which names the file."""
    found = parse_json(str(path), path.read_bytes())
    if not isinstance(found, dict):
        raise DataError(str(path), "it holds no JSON object")
    return found


def parse_finite_json(
    where: str, content: bytes, replace_non_finite: Callable[[str], Any] = lambda _: None
) -> Any:
    """Parse JSON like `parse_json`, but without NaN, infinities and numbers too large for a float.

    Each of them becomes `replace_non_finite(its text)`, None by default.
    """

    def parse_float(text: str) -> Any:
        return value if math.isfinite(value := float(text)) else replace_non_finite(text)

    def parse_int(text: str) -> Any:
        return int(text) if len(text) <= _MAX_DIGITS else replace_non_finite(text)

    return parse_json(
        where,
        content,
        parse_float=parse_float,
        parse_int=parse_int,
        parse_constant=replace_non_finite,
    )


def _problem(error: json.JSONDecodeError) -> str:
    """Return the problem with its column, and its line if the text has several."""
    text = error.doc.rstrip()
    is_cut = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    end = len(text) if is_cut else error.pos + 1
    column, line = end - (text.rfind("\n", 0, end - 1) + 1), text.count("\n", 0, end - 1) + 1
    place = f"line {line}, column {column}" if "\n" in text else f"column {column}"
    return f"{'cut off' if is_cut else error.msg} at {place}"
