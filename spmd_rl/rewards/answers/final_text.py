"""The part of a response that answers: what the model said last, after its thought."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import MODEL, Sample

THINKING, END_OF_THINKING = "<think>", "</think>"
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


def final_text(prompt: Prompt, sample: Sample) -> str:
    """Return what follows the thought in the last turn of the model; "" in a thought that is open.

    A turn without a tag is no thought, unless what stands before it has opened one.
    """
    return split_thought(sample.answer, begins_in_thought(prompt.text, sample.messages))[1]


def split_thought(text: str, is_begun: bool) -> tuple[str, str]:
    """Return the thought of a turn, and what follows it; all is thought where none is closed.

    `is_begun` says that the turn goes on with a thought.
    """
    before, closed, rest = text.rpartition(END_OF_THINKING)
    is_open = THINKING in rest or (is_begun and not closed)
    return (text, "") if is_open else (before, rest)


def final_answer(prompt: Prompt, sample: Sample) -> str:
    """Return what is in the last `<answer>...</answer>` after the thought.

    Without one, it is all that follows the thought.
    """
    rest = final_text(prompt, sample)
    found = _ANSWER.findall(rest)
    return found[-1] if found else rest


def opens_thought(text: str) -> bool:
    """Return whether a text, such as a prompt, ends with the tag that begins a thought."""
    return text.rstrip().endswith(THINKING)


def begins_in_thought(prompt: str, messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the last turn goes on with a thought that was begun before it.

    `messages` are those after the prompt, up to this turn. What tools say opens and closes nothing,
    but for a tag at its end, which a template has written.
    """
    begins = is_open = opens_thought(prompt)
    for message in messages:
        text = str(message.get("content") or "")
        if message.get("role") == MODEL:
            begins = is_open
            if THINKING in text or END_OF_THINKING in text:
                is_open = text.rfind(THINKING) > text.rfind(END_OF_THINKING)
        elif text.rstrip().endswith((THINKING, END_OF_THINKING)):
            is_open = opens_thought(text)
    return begins
