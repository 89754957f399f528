"""JSON that others may have written or damaged: each value is parsed, or refused with one sentence
that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd_rl.errors import DataError

_MOST_DIGITS = 308  # of a whole number that a float can hold


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1.

    Only a newline ends a line: a JSON string may hold U+2028 and the other separators at which
    `str.splitlines` cuts.
    """
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def parse(where: str, content: bytes, **hooks: Any) -> Any:
    """The value of a line or a file; `hooks` are those of `json.loads`. Raises: DataError."""
    try:
        # from bytes it would guess at UTF-16
        return json.loads(content.decode("utf-8-sig"), **hooks)
    except UnicodeDecodeError as error:
        raise DataError(where, f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise DataError(where, f"not valid JSON: {_problem(error)}") from error
    except RecursionError as error:
        raise DataError(where, "not valid JSON: it is nested too deeply") from error
    except ValueError as error:  # Python reads no number of thousands of digits
        raise DataError(where, f"not valid JSON: {str(error).partition(';')[0]}") from error


def parse_finite(where: str, content: bytes, beyond: Callable[[str], Any] = lambda _: None) -> Any:
    """As `parse`; NaN, infinities and numbers that no float can hold become what `beyond` makes of
    their text.
    """

    def real(text: str) -> Any:
        return value if math.isfinite(value := float(text)) else beyond(text)

    def whole(text: str) -> Any:
        return int(text) if len(text) <= _MOST_DIGITS else beyond(text)

    return parse(where, content, parse_float=real, parse_int=whole, parse_constant=beyond)


def _problem(error: json.JSONDecodeError) -> str:
    """What is wrong and in which column; the line too where there are several."""
    text = error.doc.rstrip()
    is_cut = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    end = len(text) if is_cut else error.pos + 1
    column, line = end - (text.rfind("\n", 0, end - 1) + 1), text.count("\n", 0, end - 1) + 1
    place = f"line {line}, column {column}" if "\n" in text else f"column {column}"
    return f"{'cut off' if is_cut else error.msg} at {place}"
