r"""Answers of several parts: written as the lists that math-verify reads, or known as unreadable.

Of `\begin{cases}`, `\lor` or `x=\pm 2` beside another part, math-verify reads one number alone.
"""

from __future__ import annotations

import re

FORMULA = re.compile(r"(?<!\\)(?:\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
_TEXT = r"\\(?:text(?:rm|bf|it|sf)?|mbox|mathrm|rm)\s*\{"
_ROWS = re.compile(
    r"(?:(?:\\left\s*)?\\l?\{\s*|\\left\s*\\lbrace\s*)?\\begin\{(?P<kind>cases|aligned|align\*?|gathered|split|array)\}"
    r"(?:\s*\{[lcr|\s]*\})?(?P<rows>.*?)\\end\{(?P=kind)\}(?:\s*\\right\s*\.)?",
    re.DOTALL,
)
_RELATION = re.compile(
    r"[=<>\u2264\u2265]|\\(?:[lg]e(?:q|qslant)?|neq?|in|approx|lt|gt)(?![a-zA-Z])"
)
_ALIGNED = re.compile(rf"&\s*(?={_RELATION.pattern})|(?<==)\s*&")
_CONDITION = re.compile(r"\b(?:if|when|for|otherwise|else)\b")
_GAP = r"(?:\\[,;:! ])?"  # what separates formulas, as far as it would be read as a comma
_JOIN = re.compile(
    rf"{_GAP}\s?(?:\\(?:lor|vee|land|wedge)(?![a-zA-Z])|{_TEXT}[\s~,]*(?:and|or)[\s~]*\}}"
    rf"|(?:(?<=\d)|(?<=\d\s)){_TEXT}[^{{}}]*[\s~](?:and|or)[\s~]*\}})\s?{_GAP}"
)
_WORD_JOIN = re.compile(r"(?<=[\s}])(?:and|or)(?=[\s\\$])")
_LISTED_UNIT = re.compile(rf"(?:(?<=\d)|(?<=\d\s)){_TEXT}[^{{}}\d]*\}}(?=\s?[,;])")
_LISTED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_SIGNS = re.compile(r"\\pm(?![a-zA-Z])|\u00b1")
_NUMBER = r"\d+(?:\.\d+)?"
_ABOUT = re.compile(
    r"(?:\\approx|\\simeq|\\sim|\u2248|=)\s*(?![a-zA-Z])"
)  # before the whole answer
_RATIO = re.compile(rf"{_NUMBER}(?:\s*:\s*{_NUMBER}){{2,}}")

_FUNCTION = r"(?:log|ln|lg|sin|cos|tan|cot|sec|csc|exp|sqrt|pi|mod)"
_UNREADABLE = {
    "it has numbered parts": re.compile(
        r"(?<![a-z\d)])\((?:1|a|i)\)\s*(?=[^\s,;)]).+?(?<![a-z\d)])\((?:2|b|ii)\)\s*[^\s,;]"
        r"|^(?:1|a|i)[).]\s.+?[\s,;](?:2|b|ii)[).]\s*\S",
        re.DOTALL | re.IGNORECASE,
    ),
    "a word, unit or space stands between two numbers": re.compile(
        rf"(?<![_\d.])\d+(?:\.\d+)?\s*(?:{_TEXT}[^{{}}]*[a-zA-Z'\"][^{{}}]*\}}\.?"
        rf"|(?<![\\a-zA-Z])(?!{_FUNCTION}(?![a-zA-Z]))[a-zA-Z]{{2,}}\.?|[hmdR]"
        r"|(?<=\s)[a-zA-Z](?=\s)|\^\s*\{?\\circ\}?|\u00b0|['\u2032]"
        r"|(?<=\s)|(?:\\(?:q?quad|[ ,;:!])|~)+)\s*\d"
        r"|(?<![_^\d.])\d+\s*\(\s*\d+\s*\)|\(\s*\d+\s*\)\s*\d"
    ),
    "no comma stands between its equations": re.compile(
        r"=[^=,;]*(?:\||\\(?:q?quad|mid|implies|iff|to|\\|[a-zA-Z]*[rR]ightarrow|text)|\d\s+[a-zA-Z])[^=,;]*="
    ),
    "it is a date": re.compile(r"\d{4}-\d\d?-\d\d?|\d+/\d+/\d{4}"),
}


def lists_in(text: str) -> str:
    r"""Return a text in which rows of equations, and parts with "or" between them, are lists.

    In its formulas, `\pm` is written as two parts.
    """
    if _SIGNS.search(text):
        text = FORMULA.sub(lambda match: f"${_signed(match[1] or match[2] or match[3])}$", text)
    return re.sub(r",\s?,", ", ", _JOIN.sub(", ", _ROWS.sub(_listed, text)))


def lists_of(answer: str) -> str:
    """Return an answer, such as what is in a box, with its parts as a list."""
    text = _ABOUT.sub("", answer, count=1) if _ABOUT.match(answer) else answer
    text = lists_in(text).replace("~", " ").replace(r"\langle", "(").replace(r"\rangle", ")")
    text = _LISTED_UNIT.sub("", re.sub(r",\s?,", ", ", _WORD_JOIN.sub(", ", text)))
    if ", " in text or ";" in text:
        text = _LISTED_THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _ratio(text) if _RATIO.fullmatch(text) else _signed(text)


def _ratio(text: str) -> str:
    """Return a ratio of three numbers or more as those of the others to the first."""
    first, *others = re.split(r"\s*:\s*", text)
    return "({})".format(", ".join(rf"\frac{{{one}}}{{{first}}}" for one in others))


def why_unreadable(answer: str) -> str:
    """Return why an answer, written by `of_answer`, cannot be compared; "" if it can."""
    return next((why for why, form in _UNREADABLE.items() if form.search(answer)), "")


def _listed(match: re.Match[str]) -> str:
    """Return equations in rows as a list; what are no equations, such as a matrix, as it is."""
    rows = re.split(r"\\\\(?:\s*\[[^\]]*\])?", match["rows"])
    cells = [cell.strip(" \n,;.") for row in rows for cell in _ALIGNED.sub("", row).split("&")]
    cells = [cell for cell in cells if cell]
    is_list = all(_RELATION.search(cell) and not _CONDITION.search(cell) for cell in cells)
    return ", ".join(cells) if is_list else match[0]


def _signed(text: str) -> str:
    return "".join(map(_both_signs, _parts(text))) if _SIGNS.search(text) else text


def _parts(text: str) -> list[str]:
    """Return the parts between commas outside of brackets, with these commas."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        parts[-1] += letter
        if letter in ",;" and depth <= 0:
            parts.append("")
    return parts


def _both_signs(part: str) -> str:
    r"""Return the two parts that one `\pm` stands for."""
    if len(_SIGNS.findall(part)) != 1 or r"\{" in part:
        return part
    end = part[len(part.rstrip(",;")) :]
    one, other = (_SIGNS.sub(sign, part.rstrip(",;")) for sign in "+-")
    return f"{one}, {other}{end}"
