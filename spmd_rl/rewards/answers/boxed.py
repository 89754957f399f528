r"""The last `\boxed{...}` of a text, and graders that read nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

_MARK = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def has_box(text: str) -> bool:
    """Return whether a box begins in a text, whether or not it ends."""
    return any(len(mark[0]) > 2 for mark in _MARK.finditer(text))


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last `\boxed{...}` or `\fbox{...}`; None without one.

    One that is cut off before its end is no answer, and neither is an earlier one then. Braces may
    be nested; `\{` and `\}` do not count. It reads the text once.
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
    is_cut = any(is_box and start > last_start for start, is_box in opened)
    return None if is_cut else found


def in_last_box(grader: Callable[..., Any]) -> Callable[..., Any]:
    r"""Return a grader of one sample that reads only what is in its last `\boxed{...}`.

    The box is looked for after the thought. Without one, the grader reads an empty text.
    """

    @wraps(grader)
    def grade(prompt: Prompt, sample: Sample) -> Any:
        box = last_boxed(final_text(prompt, sample)) or ""
        alone = sample.replace(text=box.strip(), metadata={})
        return grader(prompt.replace(text=""), alone)  # so that no thought begins before the box

    return grade
