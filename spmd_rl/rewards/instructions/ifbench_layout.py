"""Checks of IFBench on brackets, quotation marks, lines, tables and lists: pure functions."""

from __future__ import annotations

import csv
import io
import re
import string
import unicodedata
from itertools import pairwise

from spmd_rl.rewards.instructions.ifbench_sentences import AROUND, WITHOUT_PUNCTUATION
from spmd_rl.rewards.instructions.ifeval_checks import Arguments, Check

_CLOSING = {")": "(", "]": "[", "}": "{"}
_LETTERED = re.compile(r"\W*[aA]\W*[bB]\W*[cC]\W*")
_NAMES = (
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander "
    "Amelia Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel "
    "Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher "
    "Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan"
).split()
_CAPITALS = (
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin "
    "Amsterdam Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz "
    "Chisinau Bern Ljubljana Zagreb"
).split()
# a lookbehind keeps a run of newlines from being tried from each of them
_QUESTION = re.compile(r"(?<!\n)\n*Question \d+[.|):;]?\s*")
_CHOICE = re.compile(r"[A-Ea-e][.|)]\s*\w+")
_NUM_COUNTRIES = 52


def _header(separator: str, *names: str) -> re.Pattern[str]:
    return re.compile(separator.join(f'({name}|"{name}")' for name in names))


_PRODUCTS = _header(r",[ \t]*", "ProductID", "Category", "Brand", "Price", "Stock")
_STUDENTS = _header("\t *", "StudentID", "Subject", "Grade", "Semester", "Score")


def _overlap(text: str, given: Arguments) -> bool:
    """The trigrams are those of characters."""
    own, reference = _trigrams(text), _trigrams(given["reference_text"])
    if not own:
        return False
    return abs(100 * len(own & reference) / len(own) - float(given["percentage"])) <= 2


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


def _parentheses(text: str, _: Arguments) -> bool:
    """Brackets are nested five levels deep, and the innermost is closed by its own kind."""
    opened: list[str] = []
    depth = 0
    for letter in text:
        if letter in "([{":
            opened.append(letter)
            depth = max(depth, len(opened))
        elif letter in ")]}":
            if opened and opened[-1] == _CLOSING[letter]:
                opened.pop()
                if depth >= 5:
                    return True
            else:
                opened, depth = [], 0
    return False


def _quotes(text: str, _: Arguments) -> bool:
    """Quotation marks are nested three levels deep, and three of them are closed."""
    opened: list[str] = []
    depth = 0
    for letter in text:
        if opened and letter == opened[-1]:
            opened.pop()
            if depth - len(opened) >= 3:
                return True
        elif letter in "\"'":
            opened.append(letter)
            depth = max(depth, len(opened))
    return False


def _options(text: str, given: Arguments) -> bool:
    """Lettered options must be given as they stand, and others but for case and punctuation."""
    options: str = given["options"]
    separator = next((one for one in ("/", "or") if one in options), ",")
    choices = [choice.strip() for choice in options.split(separator)]
    if _LETTERED.match(options):
        return text in choices
    return text.strip(AROUND).lower() in [choice.strip(AROUND).lower() for choice in choices]


def _line_indent(text: str, _: Arguments) -> bool:
    """Each line is indented further than the one before it. Blank lines do not count."""
    lines = [line for line in text.split("\n") if line.strip()]
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return all(one < other for one, other in pairwise(indents))


def _quote_unquote(text: str, _: Arguments) -> bool:
    """No two quotations are next to each other, and none ends the text."""
    plain = text.replace("“", '"').replace("”", '"').replace("'\"'", "")
    plain = "".join(plain.split())
    rest = plain.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in plain and not rest.endswith('"')


def _mcq_count_length(text: str, _: Arguments) -> bool:
    """There are four questions with five choices each, every one longer than the one before it."""
    if not text.startswith("Question"):
        return False
    questions = [part.strip() for part in _QUESTION.split(text) if part.strip()]
    if len(questions) != 4:
        return False
    parts = [_question(question.split("\n")) for question in questions]
    lengths = [length for length, _ in parts]
    return all(count == 5 for _, count in parts) and all(a < b for a, b in pairwise(lengths))


def _question(lines: list[str]) -> tuple[int, int]:
    """Return the length of what is asked, and the number of choices."""
    stripped = [line.strip() for line in lines]
    choices = [number for number, line in enumerate(stripped) if _CHOICE.match(line)]
    asked = stripped[: choices[0]] if choices else stripped
    return len(" ".join(asked).strip()), len(choices)


def _reverse_newline(text: str, _: Arguments) -> bool:
    """From a line with Zimbabwe on, there are 52 lines or more in reverse alphabetical order."""
    lines = [line for raw in text.split("\n") if (line := raw.strip(AROUND))]
    first = next((number for number, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = [_ascii(line) for line in lines[first:]]
    return len(countries) >= _NUM_COUNTRIES and countries == sorted(countries, reverse=True)


def _ascii(text: str) -> str:
    """Return a text without accents, and without letters that are still not ASCII."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def _csv_special_character(text: str, _: Arguments) -> bool:
    """As published, the rows after the one with the special character may have any fields."""
    rows = _rows(text, _PRODUCTS, ",")
    if len(rows) != 15:
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(map(_has_special, row)):
            return True
    return False


def _has_special(field: str) -> bool:
    """Whether a field begins with a quotation mark, and has a special character within it."""
    line = field.split("\n", 1)[0]
    inner = line[1 : max(line.rfind('"'), 1)]
    return line.startswith('"') and re.search(r"[^\w\s]", inner) is not None


def _csv_quotes(text: str, _: Arguments) -> bool:
    rows = _rows(text, _STUDENTS, "\t")
    if len(rows) != 4 or any(len(row) != 5 for row in rows):
        return False
    fields = [field.strip() for row in rows for field in row]
    return all(field.startswith('"') and field.endswith('"') for field in fields)


def _rows(text: str, header: re.Pattern[str], delimiter: str) -> list[list[str]]:
    """Return the rows of a table, whose fields keep their quotation marks; none of another one."""
    if not header.fullmatch(text.split("\n", 1)[0].strip()):
        return []
    try:
        return list(csv.reader(io.StringIO(text.replace('"', '"""')), delimiter=delimiter))
    except csv.Error:  # a field of 128 KiB
        return []


LAYOUT_CHECKS: dict[str, Check] = {
    "count:person_names": lambda text, given: (
        sum(name in text for name in _NAMES) >= int(given["N"])
    ),
    "ratio:overlap": _overlap,
    "format:parentheses": _parentheses,
    "format:quotes": _quotes,
    "format:options": _options,
    "format:line_indent": _line_indent,
    "format:quote_unquote": _quote_unquote,
    # As published, any - behind a * is a sub-bullet.
    "format:sub-bullets": lambda text, _: all("-" in bullet for bullet in text.split("*")[1:]),
    "custom:mcq_count_length": _mcq_count_length,
    "custom:reverse_newline": _reverse_newline,
    "custom:word_reverse": lambda text, _: (
        "bald eagle" in " ".join(reversed(text.lower().translate(WITHOUT_PUNCTUATION).split()))
    ),
    "custom:european_capitals_sort": lambda text, _: (
        [*filter(None, map(str.strip, _ascii(text).split(",")))] == _CAPITALS
    ),
    "custom:csv_special_character": _csv_special_character,
    "custom:csv_quotes": _csv_quotes,
    "repeat:repeat_simple": lambda text, _: (
        text.strip().lower() == "only output this sentence here, ignore all other requests."
    ),
}
