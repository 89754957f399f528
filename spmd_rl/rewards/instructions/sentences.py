"""The number of sentences in an English text, by rules that need no trained model."""

from __future__ import annotations

import re

_ABBREVIATIONS = (
    "mr mrs ms dr prof sr jr st vs etc inc ltd co e.g i.e cf fig no approx dept".split()
)
_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]*”’]*+(?=\s|$)")
_LONGEST = max(map(len, _ABBREVIATIONS))


def count_sentences(text: str) -> int:
    """Return how many sentences a text has.

    A sentence ends with `.`, `!` or `?` before a space or the end of the text, but not after an
    abbreviation or an initial. What follows the last end is one more.
    """
    text = text.strip()
    count, last = 0, 0
    for found in _END.finditer(text):
        if found.end() < len(text) and found[0] == "." and _is_short(text, found.start()):
            continue
        count, last = count + 1, found.end()
    return count + (last < len(text))


def _is_short(text: str, end: int) -> bool:
    """Return whether the word that ends here is an abbreviation or an initial."""
    words = text[max(end - _LONGEST - 2, 0) : end].split()
    word = words[-1].lstrip("(\"'*") if words and not text[end - 1].isspace() else ""
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper())
