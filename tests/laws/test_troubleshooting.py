"""docs/troubleshooting.md quotes messages that the code has.

A line of its ```text blocks is a message in which "..." stands for values. Each piece between two
of them must stand in one string of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from tests.laws.source import ROOT, package_modules

PAGE = ROOT / "docs/troubleshooting.md"
VALUE = "\0"
_QUOTES = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SHORTEST = 4  # shorter pieces, such as ": ", are in any code


def strings(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; `VALUE` stands for what an f-string fills in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def messages() -> str:
    return "\n".join(text for module in package_modules() for text in strings(module.tree))


def quotes(page: str) -> list[str]:
    return [line for block in _QUOTES.findall(page) for line in block.splitlines()]


def unknown(lines: Iterable[str], code: str) -> list[str]:
    """The pieces that no string of the code contains."""
    pieces = (piece.strip(" :;,.()") for line in lines for piece in line.split("..."))
    return [piece for piece in pieces if len(piece) >= _SHORTEST and piece not in code]


def test_every_quoted_message_is_in_the_code() -> None:
    lines = quotes(PAGE.read_text(encoding="utf-8"))
    assert len(lines) > 20
    assert unknown(lines, messages()) == []


def test_a_stale_message_is_seen() -> None:
    code = "\n".join(strings(ast.parse('raise E(f"no model at {path}: look there")')))
    assert unknown(["no model at ...: look there"], code) == []
    assert unknown(["no folder at ...: look there"], code) == ["no folder at"]
