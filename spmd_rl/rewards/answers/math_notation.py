r"""Notations of numbers that math-verify misreads, written as it reads them.

These are E notation, powers of ten, prices, degrees, repeating decimals, mixed numbers, and spaces
between thousands. `1e-5` is always a number here; e minus 5 with a factor is `1 e - 5`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from spmd_rl.rewards.answers.math_parts import lists_in, lists_of

MAX_EXPONENT = 1_000  # of ten, in what is written out
_MINUS = "\u2212\u2013"  # the minus sign, and the dash that stands for it
_MINUS_SIGN = re.compile(  # each minus sign; a dash before a number, unless it joins two of them
    r"[\u2212\uff0d\ufe63]|(?<![\w)}\]%$])[\u2010-\u2013](?=[\d.\\$])|(?<=[=(,\[{]\s)[\u2010-\u2013](?=[\d.\\$])"
)
_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+"
)
_FRACTIONS = {"\u00bd": "1/2", "\u2153": "1/3", "\u2154": "2/3", "\u00bc": "1/4", "\u00be": "3/4"}
_SIGNS = {"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00d7": r"\times ", "\u00b7": r"\cdot "}
_SIGNS |= {"\u2264": r"\le ", "\u2265": r"\ge "}
_ROOT = re.compile(r"\u221a\s*(\d+|[a-z])")

_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+"
_POWER = rf"\{{?\s*(?P<NAME>[-+{_MINUS}]?\d+)\s*\}}?"
_SCIENTIFIC = re.compile(
    rf"(?<![\w.\\])(?P<digits>{_DIGITS})"
    r"(?:\s*(?:\\times|\\cdot|[\u00d7\u00b7*xX])\s*10\s*\^\s*"
    + _POWER.replace("NAME", "power")
    + r"|(?:[eE]|\\(?:mathrm|text|rm)\{[eE]\})"
    + _POWER.replace("NAME", "exponent")
    + r")(?!\w|\.\d)"
)
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_DOLLAR = re.compile(r"(?<!\\)\$")
_WORDS = r"(?:euros?|cents?|dollars?|pounds?|EUR|USD|GBP)"
_MONEY = re.compile(
    r"(?:US)?\\\$|[\u20ac\u00a3\u00a5\u20b9\u00a2]|\\(?:euro|texteuro|pounds|cents?|EUR)(?![a-zA-Z])"
    rf"|(?<=\d)\s*{_WORDS}(?![a-zA-Z])|(?<![a-zA-Z]){_WORDS}\s*(?=\d)"
)
_CONTINENTAL = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+),(\d+)(?![\d.,])")
_EURO_CENTS = re.compile(r"(?<=\u20ac)(\s*\d+),(\d\d)(?!\d)|(?<![\d,])(\d+),(\d\d)(?=\s*\u20ac)")
_DEGREES = re.compile(
    r"(?<!\s)\s*(?:(?:\^\s*)?(?:[\u00b0\u00ba]|\\degrees?(?![a-z]))|\^\s*\{?\\circ\}?|\\textdegree"
    r"|(?<=\d)\^\{?o\}?(?![a-z]))(?:\s*(?:\\(?:text|mathrm)\{\s*)?[CF](?![a-zA-Z])\}?)?(?!\s*\d)"
)
_REPEATING = re.compile(
    r"(?<!\d)(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\s*(?:\{(?P<block>\d+)\}|(?P<digit>\d))"
)
_IN_BRACKETS = re.compile(r"(?P<whole>\d*)\.(?P<once>\d*)\((?P<block>\d+)\)(?P<digit>)")
_GOES_ON = re.compile(
    r"(?P<whole>\d*)\.(?P<once>\d*?)(?:(?P<block>\d\d+)(?P=block)+|(?P<digit>\d)(?P=digit){2,})"
    r"(?:\.\.\.|\u2026|\\l?dots)"
)
_SPACED = re.compile(
    r"(?<![\d.,])(\d{1,3}(?:(?:\\[,;:! ]|[\u00a0\u2009\u202f'~]|\{,\}|,\\!\s?)\d{3})+)(?!\d)"
)
_WHOLE_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)")
_LAST_DOT = re.compile(r"(?<=\d)\.(?=\s*(?:[}$]|\\[)\]%]|%))")
_UNIT = re.compile(  # one that could be a product of variables has a space before it
    r"(?<=\d)\s+(?:km/h|mph|k?m/s(?:\^\{?2\}?|\u00b2)?|(?:[kcm]m|m(?=[\u00b2\u00b3])|ft|in|yd|mi)"
    r"(?:\^\{?[23]\}?|[\u00b2\u00b3])|kg|[kcm]m|ft|m[lL]|kWh|Hz|mol)$"
)
MAX_REPEATING = 60  # characters of a number in which a block is looked for


def in_text(text: str) -> str:
    """Return a text in which numbers are written as math-verify reads them."""
    text = lists_in(_MINUS_SIGN.sub("-", text))
    text = _CONTINENTAL.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", text)
    text = _EURO_CENTS.sub(lambda match: ".".join(filter(None, match.groups())), text)
    text = _DEGREES.sub("", _MONEY.sub("", text))
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _REPEATING.sub(_fraction, text)
    text = _SPACED.sub(lambda match: "".join(re.findall(r"\d+", match[0])), text)
    text = _SCIENTIFIC.sub(_written_out, text)
    return _LAST_DOT.sub("", text)


def of_answer(answer: str) -> str:
    """Return an answer, such as what is in a box, as `in_text` does a text.

    It is known to be nothing but the answer, so that more notations can be told.
    """
    text = lists_of(_UNIT.sub("", without_dollar(answer.strip())))
    if _WHOLE_SPACED.fullmatch(text):
        text = text.replace(" ", "")
    size = text.lstrip("-+" + _MINUS)
    if len(size) < MAX_REPEATING and (
        repeating := _IN_BRACKETS.fullmatch(size) or _GOES_ON.fullmatch(size)
    ):
        return text[: -len(size)] + _fraction(repeating)
    for sign, fraction in _FRACTIONS.items():
        text = re.sub(rf"(?<=\d)\s*{sign}", f" {fraction}", text).replace(sign, fraction)
    if mixed := _MIXED.fullmatch(text):
        sign, whole, top, bottom = mixed.groups()
        text = rf"{sign}{whole}\frac{{{top}}}{{{bottom}}}"
    text = _ROOT.sub(r"\\sqrt{\1}", in_text(text))
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    return text.strip().removesuffix(".") if text[-2:-1].isdigit() else text.strip()


def without_dollar(text: str) -> str:
    """Return a text without its dollar sign if it has one alone, which encloses no formula."""
    return _DOLLAR.sub("", text) if len(_DOLLAR.findall(text)) == 1 else text


def _written_out(match: re.Match[str]) -> str:
    """Return a number in scientific notation as digits; the match itself where it is another."""
    before = match.string[: match.start()].rstrip()
    power = int(re.sub(f"[{_MINUS}]", "-", match["power"] or match["exponent"]))
    if before.endswith(("^", "_", "/", "\\")) or abs(power) > MAX_EXPONENT:
        return match[0]
    whole, _, rest = match["digits"].replace(",", "").partition(".")
    digits, point = whole + rest, len(whole) + power
    digits = digits.rjust(len(digits) - min(point - 1, 0), "0").ljust(point, "0")
    point = max(point, 1)
    return f"{digits[:point]}.{digits[point:]}".rstrip(".")


def _fraction(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    block = match["block"] or match["digit"]
    once = match["once"]
    repeated = Fraction(int(block), 10 ** len(block) - 1)
    value = (int(match["whole"] + once or "0") + repeated) / 10 ** len(once)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
