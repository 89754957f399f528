r"""Mathematical answers, compared by the package math-verify.

The answer of the data comes first, because its comparison is not symmetric. Its own time-outs are
signals, which cannot stop what runs in C: they are off, and the deadline of the hooks' process
holds instead. So that few texts need it, what would take long to parse or to compute is not tried.
"""

from __future__ import annotations

import logging
import re
from functools import cache, lru_cache, partial
from typing import Any

from spmd_rl.rewards.answers.boxed import has_box, last_boxed
from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.rewards.answers.math_cost import MAX_SIMPLIFIED, MAX_SOLVED, is_costly, num_parts
from spmd_rl.rewards.answers.math_notation import in_text, of_answer, without_dollar
from spmd_rl.rewards.answers.math_parse import MAX_LATEX, Read, parse, read
from spmd_rl.rewards.answers.math_parts import FORMULA, why_unreadable
from spmd_rl.rewards.answers.math_values import have_same_values, is_word, same_number
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

MAX_TEXT = 4_000  # characters at the end of a response in which its answer is looked for
_LATEX = re.compile(r"(?<!\\)(?:\$|\\[(\[])|\\boxed")  # begins a formula
_GSM8K = "####"  # stands before the answer in the data of GSM8K
_JOINED_FORMULAS = re.compile(rf"(?:(?:{FORMULA.pattern})(?:[\s,;.]|and|or)*)+", re.DOTALL)
_NUMERAL = re.compile(r"\d+(?:[.,]\d+)*")
_UNIT_POWER = re.compile(r"(?<=[a-zA-Z}])\s*\^\s*\{?-?\d\}?")
_PART = re.compile(  # of an answer: what words around it do not have
    r"[\d=<>$]|\\(?!boxed|text|mbox|mathrm)|(?<![a-zA-Z\\])[b-zB-HJ-Z](?![a-zA-Z])"
)
_INSTEAD = "write it as one value, or as values with commas between them, or leave the record out"


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
    if not agrees(prompt.answer, _as_box(text)):
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
    form = _as_box(text)
    if why := why_unreadable(last_boxed(form) or ""):
        raise ValueError(
            f"the answer {text!r} of this prompt cannot be compared, because {why}: {_INSTEAD}"
        )
    for plain in [form] if _has_latex(text) else [form, in_text(text)]:
        found = read(plain)
        if found.expression is not None and not _is_whole(plain, found):
            raise ValueError(
                f"only {found.text!r} of the answer {text!r} of this prompt can be read: {_INSTEAD}"
            )
        if found.expression is not None or len(text) > MAX_LATEX:
            return found.forms
    raise ValueError(f"the answer {text!r} of this prompt is no mathematics that can be parsed")


def _as_box(text: str) -> str:
    """Return an answer of the data as one box, unless words stand around its formulas."""
    inner = last_boxed(text)
    if inner is None and _has_latex(text) and not _JOINED_FORMULAS.fullmatch(text):
        return in_text(text)
    inner = FORMULA.sub(r" \1\2\3 ", text) if inner is None else inner
    return _plain(f"\\boxed{{{inner}}}")


def _is_whole(plain: str, found: Read) -> bool:
    """Return whether each part of an answer of the data was read.

    Words around what was read may be left out, and powers of units; numbers and relations may not.
    """
    written = len(_NUMERAL.findall(_UNIT_POWER.sub("", last_boxed(plain) or plain)))
    return not _PART.search(found.rest) and written <= len(_NUMERAL.findall(found.text))


@cache
def _verifier() -> Any:
    from math_verify import verify

    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)  # that its time-outs are off
    return partial(verify, timeout_seconds=None)
