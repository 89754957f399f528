r"""DeepScaler's rule: the last `\boxed{...}` after the thinking, as 1 or 0."""

from __future__ import annotations

import re

from spmd_rl.rewards.answers.boxed import last_boxed
from spmd_rl.rewards.answers.final_text import END_OF_THINKING, final_text
from spmd_rl.rewards.answers.math import MAX_TEXT, agrees, parse_answer
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

_NO_MEANING = re.compile(r"\\[!,;:]|\\left(?![a-z])|\\right(?![a-z])|\^\{?\\circ\}?|\\?[$%]|\s|\\ ")
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\{\s*[^{}]*\}(?:\^\{?\d\}?)?\s*$")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_SLASH = re.compile(r"(-?)(\d+)/(\d+)")
_NAMED = re.compile(r"[a-zA-Z]{1,2}=(?=[^=]+$)")  # x=5


def deepscaler(prompt: Prompt, sample: Sample) -> float:
    r"""Return 1 if the last `\boxed{...}` after `</think>` equals the prompt's answer.

    A response without `</think>` gets 0. Answers are equal if their text is, or by math-verify.
    Raises: ValueError for a prompt whose answer cannot be parsed.
    """
    if END_OF_THINKING not in sample.answer:
        return 0.0
    box = last_boxed(final_text(prompt, sample)[-MAX_TEXT:])
    if box is None:
        return 0.0
    gold = _gold(prompt)
    same = normalised(box) == normalised(gold) != ""
    return float(same or agrees(gold, f"\\boxed{{{box}}}"))


def check_answer(prompt: Prompt) -> None:
    """Raise a ValueError for a prompt whose answer cannot be parsed."""
    parse_answer(_gold(prompt))


def _gold(prompt: Prompt) -> str:
    """Return the answer of a prompt, or what is in its box."""
    boxed = last_boxed(prompt.answer)
    return prompt.answer if boxed is None else boxed


def normalised(answer: str) -> str:
    """Return an answer without spaces, units, and spellings that do not change its meaning."""
    text = _NO_MEANING.sub("", _UNIT.sub("", answer.strip()))
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    named = _NAMED.match(text)
    text = text[named.end() :] if named else text
    if slash := _SLASH.fullmatch(text):
        text = f"{slash[1]}\\frac{{{slash[2]}}}{{{slash[3]}}}"
    return f"0{text}" if text.startswith(".") else text.rstrip(".")
