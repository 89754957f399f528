"""Fenced code blocks of a response."""

from __future__ import annotations

# words after a fence that mean the same language
_SAME = {"python": ("python", "python3", "py"), "bash": ("bash", "sh", "shell")}


def last_block(text: str, language: str) -> str | None:
    """Return the last fenced block of a language; without one, the last that names no language.

    A block that is not closed does not count. None: there is no such block.
    """
    wanted = _SAME.get(language.lower(), (language.lower(),))
    found: dict[bool, str] = {}  # the last block by whether it names the language
    fence, word, lines = "", "", list[str]()
    for line in text.split("\n"):
        marks = line.strip()
        if fence:
            if marks == fence:
                if word in wanted or not word:
                    found[bool(word)] = "\n".join(lines) + "\n"
                fence = ""
            else:
                lines.append(line)
        elif marks.startswith("```"):
            word = marks.lstrip("`").strip().lower().split(" ")[0]
            fence, lines = "`" * (len(marks) - len(marks.lstrip("`"))), []
    return found.get(True, found.get(False))
