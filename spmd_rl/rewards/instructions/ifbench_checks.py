"""Checks of instructions in IFBench (Pyatkin et al. 2025), one pure function each.

A check takes the response and the arguments that the data gives, under the published names. Those
that need a corpus or a trained model are in `REFUSED`.
"""

from __future__ import annotations

import csv
import re
import string
from collections import Counter
from collections.abc import Sequence
from datetime import date
from itertools import pairwise

from spmd_rl.rewards.instructions.ifbench_layout import LAYOUT_CHECKS
from spmd_rl.rewards.instructions.ifbench_sentences import (
    AROUND,
    SENTENCE_CHECKS,
    WITHOUT_PUNCTUATION,
)
from spmd_rl.rewards.instructions.ifeval_checks import Arguments, Check

_CONJUNCTIONS = frozenset("and but for nor or so yet".split())
_PRONOUNS = frozenset(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his "
    "himself she her hers herself it its itself they them their theirs themselves".split()
)
_CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_PRIMES = frozenset(n for n in range(2, 100) if all(n % divisor for divisor in range(2, n)))
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})", re.ASCII)
_OPENED, _CLOSED = re.compile("<(?:i|em)>"), re.compile("</(?:i|em)>")
_CITY_HEADER = ["ID", "Country", "City", "Year", "Count"]


def _plain_words(text: str) -> list[str]:
    return text.lower().translate(WITHOUT_PUNCTUATION).split()


def _punctuation(text: str, _: Arguments) -> bool:
    """Every mark occurs, and an interrobang besides."""
    if not any(mark in text for mark in ("!?", "?!", "\u203d")):
        return False
    rest = text.replace("?!", "", 1) if "?!" in text else text.replace("!?", "", 1)
    return all(mark in rest for mark in ".,!?;:")


def _keywords_multiple(text: str, given: Arguments) -> bool:
    counts = {f"keyword{number}": times for number, times in enumerate((1, 2, 3, 5, 7), start=1)}
    lower = text.lower()
    return all(lower.count(given[key].lower()) == times for key, times in counts.items())


def _words_japanese(text: str, given: Arguments) -> bool:
    nth = int(given["N"])
    words = [word.strip(AROUND) for word in text.split()[nth - 1 :: nth]]
    return all(_JAPANESE.search(word) for word in words if word and not word.isdigit())


def _alphabet(text: str, _: Arguments) -> bool:
    letters = [word[0] for word in _plain_words(text)]
    if not letters or letters[0] not in string.ascii_lowercase:
        return False
    first = string.ascii_lowercase.index(letters[0])
    wanted = (string.ascii_lowercase[(first + n) % 26] for n in range(len(letters)))
    return all(letter == right for letter, right in zip(letters, wanted, strict=True))


def _newline(text: str, _: Arguments) -> bool:
    """Each word stands on a line of its own."""
    plain = text.translate(WITHOUT_PUNCTUATION).strip()
    return sum(line != "" for line in plain.split("\n")) == len(plain.split())


def _thesis(text: str, _: Arguments) -> bool:
    parts = _OPENED.split(text, maxsplit=1)
    thesis, *rest = _CLOSED.split(parts[-1], maxsplit=1)
    return len(parts) == 2 and bool(thesis.strip() and rest and rest[0].strip())


def _is_napoleonic(text: str) -> bool:
    found = _DATE.fullmatch(text)
    if found is None:
        return False
    try:
        return 1769 <= date(*map(int, found.groups())).year <= 1821
    except ValueError:  # such as the 31st of June
        return False


def _csv_city(text: str, _: Arguments) -> bool:
    rows: Sequence[list[str]]
    try:
        rows = list(csv.reader(text.splitlines(keepends=True)))
    except csv.Error:  # a field of 128 KiB
        return False
    return len(rows) == 8 and rows[0] == _CITY_HEADER and all(len(row) == 5 for row in rows)


CHECKS: dict[str, Check] = {
    "count:word_count_range": lambda text, given: (
        int(given["min_words"]) <= len(re.findall(r"\w+", text)) <= int(given["max_words"])
    ),
    "count:unique_word_count": lambda text, given: (
        len({word.strip(AROUND) for word in text.lower().split()}) >= int(given["N"])
    ),
    # as published, spellings with other capitals or punctuation count as others
    "count:conjunctions": lambda text, given: (
        sum(word.strip(AROUND).lower() in _CONJUNCTIONS for word in set(text.split()))
        >= int(given["small_n"])
    ),
    "count:numbers": lambda text, given: (
        len(re.findall(r"\d+", text.translate(WITHOUT_PUNCTUATION))) == int(given["N"])
    ),
    "count:punctuation": _punctuation,
    "count:pronouns": lambda text, given: (
        sum(word in _PRONOUNS for word in _plain_words(text.replace("/", " "))) >= int(given["N"])
    ),
    "count:keywords_multiple": _keywords_multiple,
    "count:words_japanese": _words_japanese,
    "words:alphabet": _alphabet,
    "words:vowel": lambda text, _: (
        "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3
    ),
    "words:consonants": lambda text, _: all(
        _CONSONANTS.search(word) for word in text.lower().split()
    ),
    "words:palindrome": lambda text, _: (
        sum(len(word) >= 5 and word == word[::-1] for word in _plain_words(text)) >= 10
    ),
    "words:prime_lengths": lambda text, _: all(
        len(word) in _PRIMES for word in text.translate(WITHOUT_PUNCTUATION).split()
    ),
    "words:repeats": lambda text, given: (
        max(Counter(_plain_words(text)).values(), default=0) <= int(given["small_n"])
    ),
    "words:paragraph_last_first": lambda text, _: all(
        words[0] == words[-1]
        for line in text.lower().split("\n")
        if (words := line.strip().strip(AROUND).split())
    ),
    "words:no_consecutive": lambda text, _: all(
        word[0] != following[0] for word, following in pairwise(_plain_words(text))
    ),
    "format:newline": _newline,
    "format:list": lambda text, given: len(re.findall(re.escape(given["sep"]), text)) >= 2,
    "format:thesis": _thesis,
    "format:output_template": lambda text, _: all(
        part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:no_whitespace": lambda text, _: not any(letter.isspace() for letter in text),
    "repeat:repeat_change": lambda text, given: (
        text != given["prompt_to_repeat"]
        and text.split()[1:] == given["prompt_to_repeat"].split()[1:]
    ),
    "repeat:repeat_span": lambda text, given: (
        text.lower().split()
        == given["prompt_to_repeat"].lower().split()[int(given["n_start"]) : int(given["n_end"])]
    ),
    "custom:character_reverse": lambda text, _: "elgae dlab" in text.lower(),
    "custom:multiples": lambda text, _: (
        re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]
    ),
    "custom:date_format_list": lambda text, _: all(
        _is_napoleonic(part.strip()) for part in text.strip().split(",")
    ),
    "custom:csv_city": _csv_city,
    **SENTENCE_CHECKS,
    **LAYOUT_CHECKS,
}

# published checks that are not here, and what they need
REFUSED = {
    "ratio:stop_words": "NLTK's list of stop words",
    "words:start_verb": "NLTK's tagger",
    "words:odd_even_syllables": "a dictionary of syllables",
    "words:keywords_specific_position": "NLTK's tokenizer, which is a trained model",
    "words:words_position": "NLTK's tokenizer, which is a trained model",
    "format:title_case": "NLTK's tokenizer, which is a trained model",
    "format:emoji": "a table of all emoji",
}
