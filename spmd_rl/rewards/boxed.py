r"""The last `\boxed{...}` of a text, and graders that read nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from spmd_rl.types.samples import Sample

_MARK = re.compile(r"\\(?:boxed|fbox)\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last `\boxed{...}` or `\fbox{...}` that is closed, or None.

    Braces may be nested; `\{` and `\}` do not count. It reads the text once.
    """
    found: str | None = None
    last_start = -1
    opened: list[tuple[int, bool]] = []  # where the inside of each open brace begins; is it a box
    for mark in _MARK.finditer(text):
        if mark[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > last_start:
                found, last_start = text[start : mark.start()], start
        elif mark[0].endswith("{") and mark[0] != "\\{":
            opened.append((mark.end(), len(mark[0]) > 1))
    return found


def in_last_box(grader: Callable[..., Any]) -> Callable[..., Any]:
    r"""Return a grader of one sample that reads only what is in its last `\boxed{...}`.

    Without one, it reads an empty text.
    """

    @wraps(grader)
    def grade(prompt: Any, sample: Sample) -> Any:
        return grader(prompt, sample.replace(text=(last_boxed(sample.text) or "").strip()))

    return grade
