r"""Search for the answer in a text, by the patterns and the LaTeX grammar of math-verify.

It finds what `math_verify.parse` finds, with two differences. Plain arithmetic such as `3/4` is
never given to Python's `eval`, which sympy's parser of such text calls. And a text that would take
the grammar minutes, such as deeply nested brackets, is not parsed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from spmd_rl.rewards.answers.boxed import last_boxed

MAX_ATTEMPTS = 20  # texts that look like an answer, from the best on, until one can be parsed
MAX_LATEX = 1_000  # characters of formulas that are parsed in one text; each takes up to 3 ms
MAX_ROUND, MAX_CURLY = 12, 40  # nested brackets; each more costs the grammar a multiple
MAX_UNIONS, MAX_SYMBOL_UNIONS = 40, 5  # joined sets; with symbols each is compared with each
MAX_COLUMNS = 12  # signs between columns in a matrix of which the determinant is computed
_EAGER = re.compile(r"\\(?:gcd|lcm|[dt]?binom|choose|bmod|pmod|mod)|gcd|lcm")  # are computed
_DETERMINANT = re.compile(r"\\det|[vV]matrix")
_SETS, _SYMBOL = re.compile(r"\\(?:cup|cap|setminus|backslash)"), re.compile(r"(?<![\\a-z])[a-z]")
_LARGE = re.compile(r"\d{5}|\^|!")
_OPERATORS = {ast.Add: "Add", ast.Sub: "Add", ast.Mult: "Mul", ast.Div: "Mul", ast.Pow: "Pow"}


class Read(NamedTuple):
    """What was read of a text: an expression or None, the text of it, and the text around it.

    `said` is the text of the best match, whether or not it could be parsed.
    """

    expression: Any
    text: str
    rest: str
    said: str

    @property
    def forms(self) -> list[Any]:
        """The expression and the text, as far as there are any."""
        return [one for one in (self.expression, self.said) if one is not None and one != ""]


def parse(text: str) -> list[Any]:
    """Return the answer of a text as a sympy expression and as text; empty if there is none."""
    return read(text).forms


def read(text: str) -> Read:
    """Read the answer of a text.

    Formulas beyond `MAX_LATEX` are not parsed: the answer is only a text then.
    """
    said, left = "", MAX_LATEX
    for number, (match, target) in enumerate(_matches(text)):
        if number == MAX_ATTEMPTS:
            break
        left -= len(match[0])
        if left < 0:
            said = said or last_boxed(match[0]) or match[0]
            break
        expression, found = _extract(match, target)
        said = said or found
        if expression is not None:
            rest = text[: match.start()] + text[match.end() :]
            return Read(expression, found, rest, said)
    return Read(None, "", text, said)


def _matches(text: str) -> Iterator[tuple[re.Match[str], Any]]:
    """Yield what looks like an answer, the best first, and which kind it is."""
    for _, group in groupby(_patterns(), key=lambda pattern: pattern[0]):
        found = [
            (match, target) for _, pattern, target in group for match in pattern.finditer(text)
        ]
        found.sort(key=lambda one: (one[0].end(), -one[0].start()), reverse=True)
        yield from found


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[int, re.Pattern[str], Any]]:
    """Return the priority, pattern and kind of each form of an answer, the best first."""
    from math_verify.parser import (
        ExprExtractionConfig,
        LatexExtractionConfig,
        get_extraction_regexes,
    )

    kinds = get_extraction_regexes([LatexExtractionConfig(), ExprExtractionConfig()])
    patterns = [
        (priority, pattern, target) for found, target in kinds for pattern, priority in found
    ]
    return sorted(patterns, key=lambda pattern: pattern[0])


def _extract(match: re.Match[str], target: Any) -> tuple[Any, str]:
    """Return the expression, or None, and the text that a pattern has found."""
    from math_verify.parser import LatexExtractionConfig, extract_latex, extract_match

    if isinstance(target, LatexExtractionConfig):
        return extract_latex(match, target) if is_harmless(match[0]) else (None, "")
    if text := match.groupdict().get("expr"):
        return arithmetic(text.replace("\n", " ").replace("^", "**")), text
    return extract_match(match, target)


def is_harmless(latex: str) -> bool:
    """Return whether LaTeX can be parsed in a short time."""
    if _EAGER.search(latex) and _LARGE.search(latex):
        return False
    if _DETERMINANT.search(latex) and latex.count("&") > MAX_COLUMNS:
        return False
    most = MAX_SYMBOL_UNIONS if _SYMBOL.search(latex) else MAX_UNIONS
    if len(_SETS.findall(latex)) > most:
        return False
    # a bracket of one kind may close one of another, in a half-open interval
    return _depth(latex, "([", ")]") <= MAX_ROUND and _depth(latex, "{", "}") <= MAX_CURLY


def _depth(text: str, opening: str, closing: str) -> int:
    """Return how deep brackets are nested."""
    depth = deepest = 0
    for letter in text:
        depth = max(depth + (letter in opening) - (letter in closing), 0)
        deepest = max(deepest, depth)
    return deepest


def arithmetic(text: str) -> Any:
    """Return plain arithmetic as a sympy expression that is not evaluated, or None."""
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body)
    # numbers such as 007, brackets that do not close, too many of them
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _expression(node: ast.expr) -> Any:
    import sympy

    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Constant) and type(node.value) is float:
        return sympy.Float(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        inner = _expression(node.operand)
        minus = isinstance(node.op, ast.USub)
        return sympy.Mul(-1, inner, evaluate=False) if minus else inner
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError("no arithmetic")
    left, right = _expression(node.left), _expression(node.right)
    if isinstance(node.op, ast.Sub):
        right = sympy.Mul(-1, right, evaluate=False)
    elif isinstance(node.op, ast.Div):
        right = sympy.Pow(right, -1, evaluate=False)
    return getattr(sympy, _OPERATORS[type(node.op)])(left, right, evaluate=False)
