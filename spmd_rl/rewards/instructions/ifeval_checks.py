"""The 25 checks of instructions in IFEval (Zhou et al. 2023), one pure function each.

A check takes the response and the arguments that the data gives, under the published names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from spmd_rl.rewards.instructions.sentences import count_sentences

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

_YES_OR_NO = "My answer is yes.", "My answer is no.", "My answer is maybe."
_CODE_FENCES = "```json", "```Json", "```JSON", "```"
_STAR_BULLET = re.compile(r"^\s*\*[^*].*$", re.MULTILINE)
_HYPHEN_BULLET = re.compile(r"^\s*-.*$", re.MULTILINE)
_SINGLE_STARS = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_STARS = re.compile(r"\*\*([^\n*]*)\*\*")
_CAPITALS = re.compile(r"\w+(?:[-.&/]\w+)*")


def _compares(count: int, relation: str, limit: Any) -> bool:
    """Return whether a count is "less than" or "at least" a limit. Raises: ValueError."""
    if relation == "less than":
        return count < int(limit)
    if relation == "at least":
        return count >= int(limit)
    raise ValueError(f"the relation {relation!r} is neither 'less than' nor 'at least'")


def _has_keywords(text: str, given: Arguments) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in given["keywords"])


def _keyword_frequency(text: str, given: Arguments) -> bool:
    count = len(re.findall(given["keyword"], text, re.IGNORECASE))
    return _compares(count, given["relation"], given["frequency"])


def _forbidden_words(text: str, given: Arguments) -> bool:
    words = given["forbidden_words"]
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in words)


def _letter_frequency(text: str, given: Arguments) -> bool:
    count = text.lower().count(given["letter"].lower())
    return _compares(count, given["let_relation"], given["let_frequency"])


def _response_language(text: str, given: Arguments) -> bool:
    return _language(text) in (given["language"], None)


def _number_sentences(text: str, given: Arguments) -> bool:
    return _compares(count_sentences(text), given["relation"], given["num_sentences"])


def _number_paragraphs(text: str, given: Arguments) -> bool:
    """Paragraphs stand between `***`; only the first and the last may be empty."""
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == int(given["num_paragraphs"])


def _number_words(text: str, given: Arguments) -> bool:
    return _compares(len(re.findall(r"\w+", text)), given["relation"], given["num_words"])


def _nth_paragraph_first_word(text: str, given: Arguments) -> bool:
    """Paragraphs stand between empty lines; empty ones do not count, but keep their number."""
    parts = [part.strip() for part in text.split("\n\n")]
    filled, nth = sum(map(bool, parts)), int(given["nth_paragraph"])
    if nth > filled or not parts[nth - 1]:
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    first_word = re.split(r"[.,?!'\"]", word)[0].lower()
    return filled == int(given["num_paragraphs"]) and first_word == given["first_word"].lower()


def _number_placeholders(text: str, given: Arguments) -> bool:
    return sum(map(_count_placeholders, text.split("\n"))) >= int(given["num_placeholders"])


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
    bullets = [*_STAR_BULLET.findall(text), *_HYPHEN_BULLET.findall(text)]
    return len(bullets) == int(given["num_bullets"])


def _constrained_response(text: str, _: Arguments) -> bool:
    return any(answer in text for answer in _YES_OR_NO)


def _number_highlighted_sections(text: str, given: Arguments) -> bool:
    parts = [*_SINGLE_STARS.findall(text), *_DOUBLE_STARS.findall(text)]
    return sum(bool(part.strip()) for part in parts) >= int(given["num_highlights"])


def _multiple_sections(text: str, given: Arguments) -> bool:
    found = re.findall(rf"\s?{given['section_spliter']}\s?\d+\s?", text)
    return len(found) >= int(given["num_sections"])


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


def _repeat_prompt(text: str, given: Arguments) -> bool:
    return text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


def _end_checker(text: str, given: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def _capital_word_frequency(text: str, given: Arguments) -> bool:
    count = sum(word.isupper() for word in _CAPITALS.findall(text))
    return _compares(count, given["capital_relation"], given["capital_frequency"])


def _english_capital(text: str, _: Arguments) -> bool:
    return text.isupper() and _language(text) in ("en", None)


def _english_lowercase(text: str, _: Arguments) -> bool:
    return text.islower() and _language(text) in ("en", None)


def _no_comma(text: str, _: Arguments) -> bool:
    return "," not in text


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
    "keywords:existence": _has_keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}
