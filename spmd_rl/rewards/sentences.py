"""The number of sentences in an English text, by rules that need no trained model."""

from __future__ import annotations

import re

_ABBREVIATIONS = (
    "mr mrs ms dr prof sr jr st vs etc inc ltd co e.g i.e cf fig no approx dept".split()
)
_END = re.compile(r"(?P<word>[\w.]*?)[.!?]+[\"')\]*”’]*(?=\s+\S|$)")


def count_sentences(text: str) -> int:
    """Return how many sentences a text has.

    A sentence ends with `.`, `!` or `?` before a space or the end of the text, but not after an
    abbreviation or an initial. What follows the last end is one more.
    """
    count, last = 0, 0
    for found in _END.finditer(text):
        word, at_end = found["word"], not text[found.end() :].strip()
        stop = found[0][len(word) :]
        is_short = word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper())
        if stop == "." and is_short and not at_end:
            continue
        count += bool(text[last : found.end()].strip())
        last = found.end()
    return count + bool(text[last:].strip())
