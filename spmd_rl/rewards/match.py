"""Rewards that compare a response with the prompt's answer as text."""

from __future__ import annotations

import re

from spmd_rl.types.samples import Prompt, Sample

_NUMBER = re.compile(
    r"(?:(?<!\w)[-\u2212])?"  # a hyphen or minus sign, unless it joins two words or numbers
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # commas only between thousands
    r"(?:[eE][-+\u2212]?\d+)?"
)


def exact(prompt: Prompt, sample: Sample) -> float:
    """1 when the response is the answer, spaces around it aside, and ended by itself."""
    return float(sample.finish == "stop" and sample.text.strip() == prompt.answer.strip())


def contains(prompt: Prompt, sample: Sample) -> float:
    """1 when the answer stands anywhere in the response."""
    answer = prompt.answer.strip()
    return float(bool(answer) and answer in sample.text)


def last_number(prompt: Prompt, sample: Sample) -> float:
    """1 when the last number of the response equals that of the answer (`1,000` is `1000`, and
    `1e3` too).
    """
    said, wanted = _last_number(sample.text), _last_number(prompt.answer)
    return float(said is not None and said == wanted)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None
