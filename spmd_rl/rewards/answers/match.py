"""Reward functions that compare a response with the prompt's answer as text."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

_NUMBER = re.compile(
    r"(?:(?<!\w)[-\u2212])?"  # a hyphen or minus sign, unless it joins two words or numbers
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # commas only between thousands
    r"|(?<![\w.])\.\d+)"
    r"(?:[eE][-+\u2212]?\d+)?"
)


def exact(prompt: Prompt, sample: Sample) -> float:
    """Return 1 if the response equals the answer, without spaces around it, and was not cut off."""
    return float(sample.status == "completed" and sample.answer.strip() == prompt.answer.strip())


def contains(prompt: Prompt, sample: Sample) -> float:
    """Return 1 if the answer is anywhere in the response."""
    answer = prompt.answer.strip()
    return float(bool(answer) and answer in sample.answer)


def last_number(prompt: Prompt, sample: Sample) -> float:
    """Return 1 if the last numbers of response and answer are equal.

    `1,000`, `1000` and `1e3` are the same number.
    """
    found, expected = _last_number(sample.answer), _last_number(prompt.answer)
    return float(found is not None and found == expected)


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None
    except InvalidOperation:  # an exponent that no number can have
        return None
