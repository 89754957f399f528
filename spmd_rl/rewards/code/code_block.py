"""Fenced code blocks of a response."""

from __future__ import annotations

import re

# words after a fence that mean the same language
_SAME = {"python": ("python", "python3", "py"), "bash": ("bash", "sh", "shell")}
_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*(.*)", re.DOTALL)


def last_block(text: str, language: str) -> str | None:
    """Return the last fenced block of a language; without one, the last that names no language.

    Fences are of backticks or tildes. A block ends at a line that begins with a fence of the same
    sign, at least as long as its own, even if a word follows, unless that is the language: then
    another block begins. One that is not closed does not count. None: there is no such block.
    """
    wanted = _SAME.get(language.lower(), (language.lower(),))
    found: dict[bool, str] = {}  # the last block by whether it names the language
    fence, word, lines = "", "", list[str]()
    for line in text.split("\n"):
        marks = _FENCE.match(line)
        if marks and not marks[1].startswith(fence):  # of a block that the text of this one has
            marks = None
        begins = re.split(r"[\s{}:,]", marks[2].lower().lstrip("{."))[0] if marks else ""
        if fence and marks and begins not in wanted:
            if word in wanted or not word:
                found[bool(word)] = "\n".join(lines) + "\n"
            fence = ""
        elif marks:
            fence, word, lines = marks[1], begins, []
        elif fence:
            lines.append(line)
    return found.get(True, found.get(False))
