r"""Mathematical answers, compared by the package math-verify.

The answer of the data comes first, because its comparison is not symmetric. Its own time-outs are
signals, which cannot stop what runs in C: they are off, and the deadline of the hooks' process
holds instead. So that few texts need it, what would take long to parse or to compute is not tried.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from spmd_rl.rewards.boxed import last_boxed
from spmd_rl.rewards.final_text import after_thinking
from spmd_rl.rewards.math_cost import is_costly
from spmd_rl.rewards.math_parse import parse
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

MAX_TEXT = 4_000  # characters at the end of a response in which its answer is looked for
_LATEX = "$", "\\(", "\\[", "\\boxed"
_GSM8K = "####"  # stands before the answer in the data of GSM8K


def math(prompt: Prompt, sample: Sample) -> float:
    r"""Return 1 if the response's answer equals the prompt's, by math-verify.

    The answer is looked for after the last `</think>`, in `\boxed{...}` first.
    Raises: ValueError for a prompt whose answer cannot be parsed.
    """
    return float(agrees(prompt.answer, after_thinking(sample.text)))


def boxed_math(prompt: Prompt, sample: Sample) -> float:
    r"""Return 1 if the response's last `\boxed{...}` equals the prompt's answer, by math-verify.

    Raises: ValueError for a prompt whose answer cannot be parsed.
    """
    box = last_boxed(after_thinking(sample.text)[-MAX_TEXT:])
    return float(agrees(prompt.answer, "" if box is None else f"\\boxed{{{box}}}"))


def check_answer(prompt: Prompt) -> None:
    """Raise a ValueError for a prompt whose answer cannot be parsed."""
    parse_answer(prompt.answer)


def agrees(answer: str, text: str) -> bool:
    """Return whether the answer in a text of the model equals this answer of the data.

    Raises: ValueError for an answer of the data that cannot be parsed.
    """
    golds = parse_answer(answer)
    try:
        found = parse(text[-MAX_TEXT:])
        if any(map(is_costly, [*golds, *found])):
            return any(str(one) == str(gold) for one in found for gold in golds)
        return bool(_verifier()(golds, found))
    # sympy raises anything for a text that makes no sense
    except Exception:  # noqa: BLE001
        return False


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> list[Any]:
    """Return an answer of the data as math-verify compares it.

    Raises: ValueError for an answer that cannot be parsed.
    """
    text = answer.rpartition(_GSM8K)[2].strip()
    if not text:
        raise ValueError("the answer of this prompt is empty, but `math` compares with it")
    forms = [text] if any(mark in text for mark in _LATEX) else [f"\\boxed{{{text}}}", text]
    for form in forms:
        found = parse(form)
        if not all(isinstance(one, str) for one in found):
            return found
    raise ValueError(f"the answer {text!r} of this prompt is no mathematics that can be parsed")


@lru_cache(maxsize=1)
def _verifier() -> Any:
    from math_verify import verify

    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)  # that its time-outs are off

    def verify_golds(golds: list[Any], found: list[Any]) -> bool:
        return bool(verify(golds, found, timeout_seconds=None))

    return verify_golds
