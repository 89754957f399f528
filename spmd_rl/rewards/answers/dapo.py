"""DAPO's rule: the text after "Answer:" near the end of a response, as 1 or -1.

The normalisation is the one that Lewkowycz et al. (2022, appendix D.1) publish for MATH.
"""

from __future__ import annotations

import re

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

MAX_TEXT = 300  # characters at the end of a response
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SEVERAL = re.compile(r"[,;=&]|\\text|\\(?:lor|vee)|\b(?:and|or)\b")  # before the last "="
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples"
)
_REMOVED = (
    *_UNITS.split(),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # what is between dollars is the answer
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def dapo(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return 1 if the response's last "Answer: ..." equals the prompt's answer, else -1.

    Only its last 300 characters are read. The part "accuracy" is 1 or 0.
    Raises: ValueError for a prompt whose answer has several equations.
    """
    check_answer(prompt)
    found = _ANSWER.findall(sample.answer[-MAX_TEXT:])
    right = bool(found) and normalised(found[-1]) == normalised(prompt.answer)
    return {"reward": 1.0 if right else -1.0, "accuracy": float(right)}


def check_answer(prompt: Prompt) -> None:
    """Raise a ValueError for a prompt of whose answer only a part would count."""
    if _SEVERAL.search(prompt.answer.rpartition("=")[0]):
        raise ValueError(
            f"of the answer {prompt.answer!r} of this prompt, `dapo` would only compare what "
            "follows the last '=': write it without, or grade it with `math`"
        )


def normalised(answer: str) -> str:
    """Return an answer without units, spaces, and LaTeX that does not change its meaning."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for old in _REMOVED:
        text = text.replace(old, "")
    for pattern, new in _UNWRAPPED:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return without_commas if without_commas.isdigit() else text.strip()
