"""Checks of IFBench that split a response into sentences, one pure function each.

The rules of the split are substitutions, as IFEval and IFBench publish them: a dot that ends no
sentence is hidden first, and every other `.`, `!` and `?` then ends one. Each takes linear time.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from itertools import pairwise

from spmd_rl.rewards.instructions.ifeval_checks import Arguments, Check

WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
AROUND = string.punctuation + " "

_STARTERS = (
    r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He\s|She\s|It\s|They\s|Their\s|Our\s|We\s|But\s|However\s"
    r"|That\s|This\s|Wherever)"
)
_SUFFIXES = "(Inc|Ltd|Jr|Sr|Co)"
_ACRONYMS = "([A-Z][.][A-Z][.](?:[A-Z][.])?)"

_BEFORE_DOCTOR = (
    (re.compile("(Mr|St|Mrs|Ms|Dr)[.]"), r"\1<prd>"),
    (re.compile("[.](com|net|org|io|gov|edu|me)"), r"<prd>\1"),
    (re.compile("([0-9])[.]([0-9])"), r"\1<prd>\2"),
)
_DOTS = re.compile(r"\.{2,}")
_AFTER_DOCTOR = (
    (re.compile(r"\s([A-Za-z])[.] "), r" \1<prd> "),
    (re.compile(f"{_ACRONYMS} {_STARTERS}"), r"\1<stop> \2"),
    (re.compile("([A-Za-z])[.]([A-Za-z])[.]([A-Za-z])[.]"), r"\1<prd>\2<prd>\3<prd>"),
    (re.compile("([A-Za-z])[.]([A-Za-z])[.]"), r"\1<prd>\2<prd>"),
    (re.compile(f" {_SUFFIXES}[.] {_STARTERS}"), r" \1<stop> \2"),
    (re.compile(f" {_SUFFIXES}[.]"), r" \1<prd>"),
    (re.compile(" ([A-Za-z])[.]"), r" \1<prd>"),
)
# an end before a closing quotation mark goes behind it
_QUOTED = ((".”", "”."), ('."', '".'), ('!"', '"!'), ('?"', '"?'))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, each without space around it; none of an empty text.

    Source: the instruction checkers of Zhou et al. 2023 (IFEval) and Pyatkin et al. 2025 (IFBench).
    """
    text = f" {text}  ".replace("\n", " ")
    for pattern, replacement in _BEFORE_DOCTOR:
        text = pattern.sub(replacement, text)
    text = _DOTS.sub(lambda found: "<prd>" * len(found[0]) + "<stop>", text)
    text = text.replace("Ph.D.", "Ph<prd>D<prd>")
    for pattern, replacement in _AFTER_DOCTOR:
        text = pattern.sub(replacement, text)
    for before, after in _QUOTED:
        text = text.replace(before, after)
    for end in ".?!":
        text = text.replace(end, f"{end}<stop>")
    sentences = [part.strip() for part in text.replace("<prd>", ".").split("<stop>")]
    return sentences if sentences[-1] else sentences[:-1]


def _num_ending(sentences: list[str], end: str) -> int:
    return sum(sentence.endswith(end) for sentence in sentences)


def _num_words(sentence: str) -> int:
    return len(sentence.translate(WITHOUT_PUNCTUATION).split())


def _num_alliterative(sentence: str) -> int:
    """Return how many words are in runs of two or more words with the same first letter."""
    letters = [word[0] for raw in sentence.lower().split() if (word := raw.lstrip(AROUND))]
    same = [one == other for one, other in pairwise(letters)]
    num_runs = sum(now and not before for before, now in pairwise([False, *same]))
    return sum(same) + num_runs


def _no_bullets_bullets(text: str, _: Arguments) -> bool:
    """Lines of sentences come first, of which a blank line may be the last, and then bullets."""
    num_sentences = num_bullets = 0
    may_be_sentences = True
    for line in map(str.strip, text.split("\n")):
        if line.startswith("*"):
            may_be_sentences = False
            if num_sentences < 2:
                return False
            num_bullets += 1
        elif may_be_sentences:
            found = len(split_sentences(line))
            num_sentences, may_be_sentences = num_sentences + found, found > 0
        else:
            return False
    return num_bullets >= 2


def _follows(sentence: str, following: str) -> bool:
    """Whether a sentence begins with the last word of the one before it."""
    words, others = sentence.rstrip(AROUND).split(), following.lstrip(AROUND).split()
    return bool(words and others) and words[-1].lower() == others[0].lower()


# checks of the sentences of a response; as published, those of sentence_words may be the same
_OF_SENTENCES: dict[str, Callable[[list[str], Arguments], bool]] = {
    "ratio:sentence_type": lambda sentences, _: (
        _num_ending(sentences, ".") == 2 * _num_ending(sentences, "?")
    ),
    "ratio:sentence_balance": lambda sentences, _: (
        len({_num_ending(sentences, end) for end in ".?!"}) == 1
    ),
    "ratio:sentence_words": lambda sentences, _: (
        len(sentences) == 3 and len({len(sentence) for sentence in sentences}) == 1
    ),
    "sentence:keyword": lambda sentences, given: (
        len(sentences) >= int(given["N"])
        and given["word"].lower() in sentences[int(given["N"]) - 1].lower()
    ),
    "sentence:alliteration_increment": lambda sentences, _: all(
        count < more for count, more in pairwise(map(_num_alliterative, sentences))
    ),
    "sentence:increment": lambda sentences, given: all(
        more - count == int(given["small_n"])
        for count, more in pairwise(map(_num_words, sentences))
    ),
    "words:last_first": lambda sentences, _: all(
        _follows(sentence, following) for sentence, following in pairwise(sentences)
    ),
    "custom:sentence_alphabet": lambda sentences, _: (
        [sentence[:1].lower() for sentence in sentences] == [*string.ascii_lowercase]
    ),
}


def _of_text(check: Callable[[list[str], Arguments], bool]) -> Check:
    return lambda text, given: check(split_sentences(text), given)


SENTENCE_CHECKS: dict[str, Check] = {
    "format:no_bullets_bullets": _no_bullets_bullets,
    **{name: _of_text(check) for name, check in _OF_SENTENCES.items()},
}
