r"""The last `\boxed{...}` of a text, and graders that read nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from spmd_rl.types.samples import Sample

_MARKS = "\\boxed{", "\\fbox{"


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last `\boxed{...}` or `\fbox{...}` that is closed, or None.

    Braces may be nested; `\{` and `\}` do not count.
    """
    end = len(text)
    while (start := max(text.rfind(mark, 0, end) for mark in _MARKS)) >= 0:
        opened = text.index("{", start)
        if (closed := _closing(text, opened)) is not None:
            return text[opened + 1 : closed]
        end = opened
    return None


def _closing(text: str, opened: int) -> int | None:
    """Return the place of the brace that closes the one at `opened`, or None."""
    depth, place = 0, opened
    while place < len(text):
        letter = text[place]
        if letter == "\\":
            place += 1
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if not depth:
                return place
        place += 1
    return None


def in_last_box(grader: Callable[..., Any]) -> Callable[..., Any]:
    r"""Return a grader of one sample that reads only what is in its last `\boxed{...}`.

    Without one, it reads an empty text.
    """

    @wraps(grader)
    def grade(prompt: Any, sample: Sample) -> Any:
        return grader(prompt, sample.replace(text=(last_boxed(sample.text) or "").strip()))

    return grade
