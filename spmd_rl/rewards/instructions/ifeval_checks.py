"""The 25 checks of instructions in IFEval (Zhou et al. 2023), one pure function each.

A check takes the response and the arguments that the data gives, under the published names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

_YES_OR_NO = "My answer is yes.", "My answer is no.", "My answer is maybe."
_CODE_FENCES = "```json", "```Json", "```JSON", "```"
_BULLETS = re.compile(r"^\s*\*[^*].*$", re.MULTILINE), re.compile(r"^\s*-.*$", re.MULTILINE)
_STARS = re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*")
_CAPITALS = re.compile(r"\w+(?:[-.&/]\w+)*")

_ABBREVIATIONS = (
    "mr mrs ms dr prof sr jr st vs etc inc ltd co e.g i.e cf fig no approx dept".split()
)
_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]*”’]*+(?=\s|$)")
_LONGEST = max(map(len, _ABBREVIATIONS))


def _compares(count: int, given: Arguments, limit: str, relation: str = "relation") -> bool:
    """Return whether a count is "less than" or "at least" a limit, which have these names.

    Raises: ValueError for another relation.
    """
    if given[relation] == "less than":
        return count < int(given[limit])
    if given[relation] == "at least":
        return count >= int(given[limit])
    raise ValueError(f"the relation {given[relation]!r} is neither 'less than' nor 'at least'")


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


def _number_paragraphs(text: str, given: Arguments) -> bool:
    """Paragraphs stand between `***`; only the first and the last may be empty."""
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == int(given["num_paragraphs"])


def _nth_paragraph_first_word(text: str, given: Arguments) -> bool:
    """Paragraphs stand between empty lines; empty ones do not count, but keep their number."""
    parts = [part.strip() for part in text.split("\n\n")]
    filled, nth = sum(map(bool, parts)), int(given["nth_paragraph"])
    if nth > filled or not parts[nth - 1]:
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    first_word = re.split(r"[.,?!'\"]", word)[0].lower()
    return filled == int(given["num_paragraphs"]) and first_word == given["first_word"].lower()


def _count_placeholders(line: str) -> int:
    count = end = 0
    while (start := line.find("[", end)) >= 0 and (end := line.find("]", start) + 1):
        count += 1
    return count


def _postscript(text: str, given: Arguments) -> bool:
    marker = given["postscript_marker"]
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(patterns.get(marker, marker.lower()), text.lower()))


def _number_bullet_lists(text: str, given: Arguments) -> bool:
    text = re.sub(r"\n\s+\n", "\n\n", text)  # or else the time would be that of its square
    return sum(len(bullet.findall(text)) for bullet in _BULLETS) == int(given["num_bullets"])


def _json_format(text: str, _: Arguments) -> bool:
    inner = text.strip()
    for fence in _CODE_FENCES:
        inner = inner.removeprefix(fence)
    try:
        json.loads(inner.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, _: Arguments) -> bool:
    """A line has more than angle brackets between its first `<<` and its last `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str, _: Arguments) -> bool:
    """Two different answers stand on either side of `******`."""
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _quotation(text: str, _: Arguments) -> bool:
    inner = text.strip()
    return len(inner) > 1 and inner[0] == inner[-1] == '"'


def _language(text: str) -> str | None:
    """Return the ISO 639-1 code of a text's language; None for one without letters."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # it draws samples of the text
    try:
        return str(detect(text))
    except LangDetectException:
        return None


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, given: all(
        re.search(word, text, re.IGNORECASE) for word in given["keywords"]
    ),
    "keywords:frequency": lambda text, given: _compares(
        len(re.findall(given["keyword"], text, re.IGNORECASE)), given, "frequency"
    ),
    "keywords:forbidden_words": lambda text, given: (
        not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in given["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda text, given: _compares(
        text.lower().count(given["letter"].lower()), given, "let_frequency", "let_relation"
    ),
    "language:response_language": lambda text, given: _language(text) in (given["language"], None),
    "length_constraints:number_sentences": lambda text, given: _compares(
        count_sentences(text), given, "num_sentences"
    ),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": lambda text, given: _compares(
        len(re.findall(r"\w+", text)), given, "num_words"
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, given: (
        sum(map(_count_placeholders, text.split("\n"))) >= int(given["num_placeholders"])
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": lambda text, _: any(
        answer in text for answer in _YES_OR_NO
    ),
    "detectable_format:number_highlighted_sections": lambda text, given: (
        sum(bool(part.strip()) for stars in _STARS for part in stars.findall(text))
        >= int(given["num_highlights"])
    ),
    "detectable_format:multiple_sections": lambda text, given: (
        len(re.findall(rf"\s?{given['section_spliter']}\s?\d+\s?", text))
        >= int(given["num_sections"])
    ),
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, given: (
        text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda text, given: (
        text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())
    ),
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": lambda text, given: _compares(
        sum(word.isupper() for word in _CAPITALS.findall(text)),
        given,
        "capital_frequency",
        "capital_relation",
    ),
    "change_case:english_capital": lambda text, _: (
        text.isupper() and _language(text) in ("en", None)
    ),
    "change_case:english_lowercase": lambda text, _: (
        text.islower() and _language(text) in ("en", None)
    ),
    "punctuation:no_comma": lambda text, _: "," not in text,
}
