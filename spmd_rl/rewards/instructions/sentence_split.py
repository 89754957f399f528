"""Sentences of an English text, split as IFEval and IFBench publish it.

The rules are substitutions: a dot that ends no sentence is hidden first, and every other `.`, `!`
and `?` then ends one. Each is linear in the text.
"""

from __future__ import annotations

import re

_STARTERS = (
    r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He\s|She\s|It\s|They\s|Their\s|Our\s|We\s|But\s|However\s"
    r"|That\s|This\s|Wherever)"
)
_SUFFIXES = "(Inc|Ltd|Jr|Sr|Co)"
_ACRONYMS = "([A-Z][.][A-Z][.](?:[A-Z][.])?)"

_BEFORE_DOCTOR = (
    (re.compile("(Mr|St|Mrs|Ms|Dr)[.]"), r"\1<prd>"),
    (re.compile("[.](com|net|org|io|gov|edu|me)"), r"<prd>\1"),
    (re.compile("([0-9])[.]([0-9])"), r"\1<prd>\2"),
)
_DOTS = re.compile(r"\.{2,}")
_AFTER_DOCTOR = (
    (re.compile(r"\s([A-Za-z])[.] "), r" \1<prd> "),
    (re.compile(f"{_ACRONYMS} {_STARTERS}"), r"\1<stop> \2"),
    (re.compile("([A-Za-z])[.]([A-Za-z])[.]([A-Za-z])[.]"), r"\1<prd>\2<prd>\3<prd>"),
    (re.compile("([A-Za-z])[.]([A-Za-z])[.]"), r"\1<prd>\2<prd>"),
    (re.compile(f" {_SUFFIXES}[.] {_STARTERS}"), r" \1<stop> \2"),
    (re.compile(f" {_SUFFIXES}[.]"), r" \1<prd>"),
    (re.compile(" ([A-Za-z])[.]"), r" \1<prd>"),
)
# an end before a closing quotation mark goes behind it
_QUOTED = ((".”", "”."), ('."', '".'), ('!"', '"!'), ('?"', '"?'))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, each without space around it; none of an empty text.

    Source: the instruction checkers of Zhou et al. 2023 (IFEval) and Pyatkin et al. 2025 (IFBench).
    """
    text = f" {text}  ".replace("\n", " ")
    for pattern, replacement in _BEFORE_DOCTOR:
        text = pattern.sub(replacement, text)
    text = _DOTS.sub(lambda found: "<prd>" * len(found[0]) + "<stop>", text)
    text = text.replace("Ph.D.", "Ph<prd>D<prd>")
    for pattern, replacement in _AFTER_DOCTOR:
        text = pattern.sub(replacement, text)
    for before, after in _QUOTED:
        text = text.replace(before, after)
    for end in ".?!":
        text = text.replace(end, f"{end}<stop>")
    sentences = [part.strip() for part in text.replace("<prd>", ".").split("<stop>")]
    return sentences if sentences[-1] else sentences[:-1]
