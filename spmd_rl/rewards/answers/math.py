r"""Mathematical answers, compared by the package math-verify.

The answer of the data comes first, because its comparison is not symmetric. Its own time-outs are
signals, which cannot stop what runs in C: they are off, and the deadline of the hooks' process
holds instead. So that few texts need it, what would take long to parse or to compute is not tried.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from spmd_rl.rewards.answers.boxed import has_box, last_boxed
from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.rewards.answers.math_cost import MAX_SIMPLIFIED, MAX_SOLVED, is_costly, num_parts
from spmd_rl.rewards.answers.math_notation import in_text, of_answer, without_dollar
from spmd_rl.rewards.answers.math_parse import MAX_LATEX, parse
from spmd_rl.rewards.answers.math_values import have_same_values, is_word, same_number
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

MAX_TEXT = 4_000  # characters at the end of a response in which its answer is looked for
_LATEX = re.compile(r"(?<!\\)\$|\\[(\[]|\\boxed")  # begins a formula
_GSM8K = "####"  # stands before the answer in the data of GSM8K


def math(prompt: Prompt, sample: Sample) -> float:
    r"""Return 1 if the response's answer equals the prompt's, by math-verify.

    The answer is looked for after the thought. If there is a box, it is the last `\boxed{...}`.
    Raises: ValueError for a prompt whose answer cannot be parsed.
    """
    text = final_text(prompt, sample)[-MAX_TEXT:]
    return float(agrees(prompt.answer, _last_box(text) if has_box(text) else text))


def boxed_math(prompt: Prompt, sample: Sample) -> float:
    r"""Return 1 if the response's last `\boxed{...}` equals the prompt's answer, by math-verify.

    Raises: ValueError for a prompt whose answer cannot be parsed.
    """
    return float(agrees(prompt.answer, _last_box(final_text(prompt, sample)[-MAX_TEXT:])))


def check_answer(prompt: Prompt) -> None:
    """Raise a ValueError for a prompt whose answer cannot be parsed, or does not equal itself."""
    text = gold_text(prompt.answer)
    if not agrees(prompt.answer, text if _has_latex(text) else f"\\boxed{{{text}}}"):
        raise ValueError(
            f"the answer {text!r} of this prompt is read in such a way that not even the same "
            "text would be right: write it as a number or as LaTeX"
        )


def agrees(answer: str, text: str) -> bool:
    """Return whether the answer in a text of the model equals this answer of the data.

    Raises: ValueError for an answer of the data that cannot be parsed.
    """
    golds = parse_answer(answer)
    try:
        return _agree(golds, parse(_plain(text)))
    # sympy raises anything for a text that makes no sense
    except Exception:  # noqa: BLE001
        return False


def _agree(golds: list[Any], found: list[Any]) -> bool:
    """Return whether what was parsed is equal. What would be costly is only compared as text."""
    if not golds or not found:
        return False
    if any(map(is_costly, [*golds, *found])):
        return _same_text(golds, found)
    gold, other = golds[0], found[0]
    if isinstance(gold, str) or isinstance(other, str):
        return _same_text(golds, found)
    if (same_value := same_number(gold, other)) is not None:
        return same_value
    same = have_same_values(gold, other)
    if same is False and not is_word(gold) and not is_word(other):
        return False
    most = MAX_SOLVED if same is None else MAX_SIMPLIFIED
    if num_parts(gold) + num_parts(other) > most:
        return same or _same_text(golds, found)
    return bool(_verifier()(golds, found))


def _same_text(golds: list[Any], found: list[Any]) -> bool:
    return any(str(one) == str(gold) for one in found for gold in golds)


def _plain(text: str) -> str:
    """Return a text with its numbers as math-verify reads them."""
    box = last_boxed(text)
    return in_text(text) if box is None else f"\\boxed{{{of_answer(box)}}}"


def _last_box(text: str) -> str:
    box = last_boxed(text)
    return "" if box is None else f"\\boxed{{{box}}}"


def _has_latex(text: str) -> bool:
    return _LATEX.search(text) is not None


def gold_text(answer: str) -> str:
    """Return what counts of an answer of the data. Raises: ValueError for an empty one."""
    text = without_dollar(answer.rpartition(_GSM8K)[2].strip())
    if not text:
        raise ValueError("the answer of this prompt is empty, but `math` compares with it")
    return text


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> list[Any]:
    """Return an answer of the data as math-verify compares it.

    Raises: ValueError for an answer that cannot be parsed.
    """
    text = gold_text(answer)
    forms = [text] if _has_latex(text) else [f"\\boxed{{{text}}}", text]
    for form in forms:
        found = parse(_plain(form))
        is_text = all(isinstance(one, str) for one in found)
        if not is_text or (found and len(text) > MAX_LATEX):
            return found
    raise ValueError(f"the answer {text!r} of this prompt is no mathematics that can be parsed")


@lru_cache(maxsize=1)
def _verifier() -> Any:
    from math_verify import verify

    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)  # that its time-outs are off

    def verify_golds(golds: list[Any], found: list[Any]) -> bool:
        return bool(verify(golds, found, timeout_seconds=None))

    return verify_golds
