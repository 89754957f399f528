"""The part of a response that answers: what follows its thinking."""

from __future__ import annotations

import re

END_OF_THINKING = "</think>"
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`, or the whole text where there is none."""
    return text.rpartition(END_OF_THINKING)[2]


def final_answer(text: str) -> str:
    """Return what is in the last `<answer>...</answer>` after the thinking.

    Without one, it is all that follows the thinking.
    """
    rest = after_thinking(text)
    found = _ANSWER.findall(rest)
    return found[-1] if found else rest
