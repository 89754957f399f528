r"""Multiple choice: the letter that a response chooses, and the order of choices."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from string import ascii_uppercase

from spmd_rl.rewards.answers.boxed import last_boxed
from spmd_rl.rewards.answers.final_text import final_answer
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

CHOICES = "choices"  # the key of the record with the texts of the choices, in the order shown
_WRAPPED = r"(?:\\(?:text|textbf|mathrm|mathbf)\{|[\s*_$({\[])*(?P<letter>[A-Za-z])(?![A-Za-z'])"
_SAID = re.compile(  # "Answer: B", "the answer is (B)", "option B is correct"
    r"\b(?:answer|option|choice)\b(?:\s+is)?\s*[:=]?\s*(?:option|choice)?"
    r"(?:\\(?:text|textbf|mathrm|mathbf)\{|[\s*_$({\[]|\\boxed\{)*(?P<letter>[A-Z])(?![A-Za-z'])",
    re.IGNORECASE,
)
_ALONE = re.compile(  # a line such as "B", "(B)" or "**B.**"
    r"^[ \t*_$(\[]*(?P<letter>[A-Z])[ \t*_$)\].:]*$", re.MULTILINE
)
_BOXED = re.compile(_WRAPPED)


def multiple_choice(prompt: Prompt, sample: Sample) -> float:
    """Return 1 if the response chooses the prompt's answer, which is a letter.

    With the texts in the record's `choices`, the answer may be one of them, and so may what the
    response says. Raises: ValueError for an answer that is neither.
    """
    choices = prompt.meta.get(CHOICES) or []
    right = _right_letter(prompt.answer, choices)
    return float(chosen(final_answer(prompt, sample), choices) == right)


def check_answer(prompt: Prompt) -> None:
    """Raise a ValueError for a prompt whose answer is no choice."""
    _right_letter(prompt.answer, prompt.meta.get(CHOICES) or [])


def chosen(text: str, choices: Sequence[str] = ()) -> str:
    r"""Return the letter that a text chooses, or "".

    What counts is the last `\boxed{...}`, else the last "answer is B" or "Answer: B", else the last
    line that is a letter alone, else the whole text if it is that of a choice.
    """
    letters = ascii_uppercase[: len(choices) or None]
    if (box := last_boxed(text)) is not None:
        return _letter_of(box, choices)
    for pattern in (_SAID, _ALONE):
        found = [match["letter"] for match in pattern.finditer(text) if match["letter"] in letters]
        if found:
            return found[-1]
    return _letter_of(text, choices)


def shuffled(right: str, wrong: Sequence[str], seed: int) -> tuple[list[str], str]:
    """Return the choices in an order that depends on them and the seed alone, and the right letter.

    Data preparation calls it, so that a model cannot learn where the right choice stands.
    """
    choices = [right, *wrong]
    random.Random("\0".join([str(seed), *choices])).shuffle(choices)
    return choices, ascii_uppercase[choices.index(right)]


def _letter_of(text: str, choices: Sequence[str]) -> str:
    """Return the letter that a short text is, or that of the choice whose text it is, or ""."""
    for letter, choice in zip(ascii_uppercase, choices, strict=False):
        if text.strip().casefold() == choice.strip().casefold():
            return letter
    found = _BOXED.match(text)
    whole = found is not None and not re.search(r"[A-Za-z]", text[found.end() :])
    return found["letter"].upper() if found is not None and whole else ""


def _right_letter(answer: str, choices: Sequence[str]) -> str:
    letters = ascii_uppercase[: len(choices) or None]
    letter = _letter_of(answer, choices)
    if not letter or letter not in letters:
        raise ValueError(
            f"the answer {answer!r} of this prompt is neither a letter up to {letters[-1]} "
            "nor the text of a choice"
        )
    return letter
