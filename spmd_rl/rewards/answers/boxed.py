r"""The last `\boxed{...}` of a text, and graders that read nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.rewards.answers.squad import ANSWERS
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

MAX_NESTED = 4  # commands such as `text` around a word
_WORDS = re.compile(r"\\(?:text[a-z]*|mbox|emph|math(?:rm|bf|it|sf|tt)|rm|bf)\s*\{([^{}]*)\}")
_DELIMITERS = re.compile(r"(?<!\\)\$\$?|\\[()]|\\[,;:!]|\\q?quad(?![a-z])|\\(?= )|~")
_ESCAPED = re.compile(r"\\([$%&_#{}])")
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


def without_latex(text: str) -> str:
    r"""Return the words that LaTeX such as `\text{Paris}` or `5\ \mathrm{km}` shows."""
    for _ in range(MAX_NESTED):
        text = _WORDS.sub(r"\1", text)
    text = _DELIMITERS.sub(lambda mark: " " if mark[0][-1:] in " ~,;:d" else "", text)
    return _ESCAPED.sub(r"\1", text).strip()


def in_last_box(grader: Callable[..., Any]) -> Callable[..., Any]:
    r"""Return a grader of one sample that reads only what is in its last `\boxed{...}`.

    The box is looked for after the thought. Without one, the grader reads an empty text. It reads
    the words of the box and of the prompt's answers, without the LaTeX around them.
    """

    @wraps(grader)
    def grade(prompt: Prompt, sample: Sample) -> Any:
        box = last_boxed(final_text(prompt, sample)) or ""
        alone = sample.replace(text=without_latex(box), metadata={})
        return grader(_asks_words(prompt), alone)

    return grade


def _asks_words(prompt: Prompt) -> Prompt:
    """Return a prompt with answers without LaTeX, and no text, so that no thought begins in it."""
    more = prompt.meta.get(ANSWERS)
    meta = dict(prompt.meta)
    if isinstance(more, list) and all(isinstance(answer, str) for answer in more):
        meta[ANSWERS] = [without_latex(answer) for answer in more]
    return prompt.replace(text="", answer=without_latex(prompt.answer), meta=meta)
