"""The part of a response that follows its thinking."""

from __future__ import annotations

END_OF_THINKING = "</think>"


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`, or the whole text where there is none."""
    return text.rpartition(END_OF_THINKING)[2]
