r"""Multiple choice: the letter that a response chooses, and the order of choices."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase

from spmd_rl.rewards.answers.boxed import last_boxed, without_latex
from spmd_rl.rewards.answers.final_text import final_answer
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

CHOICES = "choices"  # the key of the record with the texts of the choices, in the order shown
# what may enclose a letter; it is bounded, so that no text takes long
_OPEN, _CLOSE = r"[\s*_({\[\"'`<>#]{0,12}", r"[\s*_)}\]\"'`<>.:,;]{0,12}"
# a letter that is no part of a word or formula, and no article or pronoun before a word
_AFTER = r"(?![\w'\u2019+#]|-\w|\s?=)"
_REASON = r"(?:because|since|as|due|for|given|based|is|but|so|which|from|with|by|here|and|or)\b"
_UPPER = rf"(?:[B-HJ-Z]{_AFTER}|[AI]{_AFTER}(?!\s+(?!{_REASON})[a-z]))"
_LOWER = rf"[a-z]{_AFTER}(?={_CLOSE}(?:$|\n))|(?<=\()[a-z](?=\))"
_SINGLE = (  # not one of several
    r"(?!\W{0,3}(?:[,/&]|\bor\b|\band\b)\s?(?:option\s|choice\s)?\W?[A-Z]\b(?!\s+is\b|'))"
)
_WRONG = r"(?:(?:is|was|are|seems?|would be)\s+(?:not|wrong|in|false|ruled)|isn.t|can(?:not|.t))"
_SAID_WORDS = (
    r"(?:\b(?i:answers?|ans|options?|choice|choose|pick|select(?:ed)?|go with)\b"
    r"(?:\s+to (?:the|this) question)?|\u7b54\u6848|\u9009\u62e9?)"
)
_IS = r"(?i:is|was|would be|should be|must be|[:=\uff1a\u662f\u4e3a]|->?|\u2192)"
_CUE = (
    rf"{_SAID_WORDS}[\s*_\"'`)]{{0,12}}(?:{_IS}[\s*_\"'`]{{0,12}}){{0,3}}(?i:option|choice|letter)?"
)
_SAID = (
    # "Answer: B", "the answer is (B)", "option B is correct"
    re.compile(rf"{_CUE}{_OPEN}(?P<letter>{_UPPER}|{_LOWER}){_SINGLE}(?!\W{{0,3}}{_WRONG})"),
    # "B is the correct answer"
    re.compile(
        rf"(?:^|(?<=[\s*_({{\[\"'`]))(?P<letter>{_UPPER})[*_)\]}}\"'`.]{{0,12}}"
        r"\s+(?:is|must be|would be|seems)(?:\s(?:the|most|clearly|therefore|indeed|thus))*"
        r"\s(?:correct|right|best|answer|true|likely|appropriate|accurate)\b"
    ),
    # "Therefore, B."
    re.compile(
        rf"\b(?i:therefore|thus|hence|so|it'?s|it is)\b[,:]?{_OPEN}"
        rf"(?P<letter>{_UPPER})(?={_CLOSE}$)",
        re.MULTILINE,
    ),
    # a line such as "B", "(B)" or "**B.**"
    re.compile(r"^[ \t*_(\[\"'`#>]*(?P<letter>[A-Z])[ \t*_)\].\"'`:]*$", re.MULTILINE),
)
_STATED = re.compile(rf"{_CUE}[:\s*_\"'`]{{0,12}}(?P<text>[^\n]+)")  # "the answer is Paris"
# a letter and a choice: "B. Paris", "(B) Paris", "**B**: Paris"
_LED = re.compile(
    r"^[ \t*_({\[\"'`#>]*(?P<letter>[A-Za-z])"
    r"(?:[*_\"'`]{0,4}[)\]}.:]{1,2}|[ \t]+[-\u2013\u2014])(?=\s|\*|_|$)"
    r"[ \t*_\"'`:]*(?P<text>[^\n]*)",
    re.MULTILINE,
)
_BARE = re.compile(r"\W*(?P<letter>[A-Z])(?:,|(?=\s))\s*(?P<text>\S[^\n]*)")


def multiple_choice(prompt: Prompt, sample: Sample) -> float:
    """Return 1 if the response chooses the prompt's answer, which is a letter.

    With the texts in the record's `choices`, the answer may be one of them, and so may what the
    response says. Raises: ValueError for an answer that is neither.
    """
    choices = prompt.meta.get(CHOICES) or []
    right = _right_letter(prompt.answer, choices)
    return float(chosen(final_answer(prompt, sample), choices) == right)


def check_answer(prompt: Prompt) -> None:
    """Raise a ValueError for a prompt whose answer is no choice."""
    _right_letter(prompt.answer, prompt.meta.get(CHOICES) or [])


def chosen(text: str, choices: Sequence[str] = ()) -> str:
    r"""Return the letter that a text chooses, or "".

    What counts is the last `\boxed{...}`, else what is said last: "answer is B", "B is correct", a
    line that is a letter alone, or "answer is" before the text of a choice. Else it is the letter
    before the text of a choice, as in "B. Paris", if there is one such letter, or the whole text if
    it is that of a choice.
    """
    if (box := last_boxed(text)) is not None:
        return _letter_of(without_latex(box), choices)
    text = without_latex(text)
    *_, letter = max(_said(text, choices), default=("",))
    return letter or _letter_of(text, choices)


def _said(text: str, choices: Sequence[str]) -> Iterator[tuple[int, bool, str]]:
    """Yield each choice that a text says: its place, whether it is its text, and its letter."""
    letters = ascii_uppercase[: len(choices) or None]
    for pattern in _SAID:
        for match in pattern.finditer(text):
            if (letter := match["letter"].upper()) in letters:
                yield match.start("letter"), False, letter
    for match in _STATED.finditer(text):
        if letter := _choice_of(match["text"], choices):
            yield match.start("text"), True, letter


def shuffled(right: str, wrong: Sequence[str], seed: int) -> tuple[list[str], str]:
    """Return the choices in an order that depends on them and the seed alone, and the right letter.

    Data preparation calls it, so that a model cannot learn where the right choice stands.
    """
    choices = [right, *wrong]
    random.Random("\0".join([str(seed), *choices])).shuffle(choices)
    return choices, ascii_uppercase[choices.index(right)]


def _letter_of(text: str, choices: Sequence[str]) -> str:
    """Return the letter that a text is or begins with, or that of the choice that it is, or ""."""
    letters = ascii_uppercase[: len(choices) or None]
    if same := _choice_of(text, choices):
        return same
    if alone := re.fullmatch(rf"{_OPEN}(?P<letter>[A-Za-z]){_CLOSE}", text):
        return alone["letter"].upper()
    led = {match["letter"].upper() for match in _LED.finditer(text) if _may_lead(match, choices)}
    if not led and (bare := _BARE.fullmatch(text)):
        led = {bare["letter"]} & {_choice_of(bare["text"], choices)}
    return led.pop() if len(led) == 1 and led <= {*letters} else ""


def _may_lead(match: re.Match[str], choices: Sequence[str]) -> bool:
    """Return whether a letter stands before a choice, which must not be another one's text."""
    return _choice_of(match["text"], choices) in ("", match["letter"].upper())


def _choice_of(text: str, choices: Sequence[str]) -> str:
    """Return the letter of the choice that a text is, apart from case and punctuation, or ""."""
    said = _words(text)
    for letter, choice in zip(ascii_uppercase, choices, strict=False):
        if said and said in (_words(choice), _words(without_latex(choice))):
            return letter
    return ""


def _words(text: str) -> str:
    return text.strip(" \t\n*_.,;:\"'`").casefold()


def _right_letter(answer: str, choices: Sequence[str]) -> str:
    letters = ascii_uppercase[: len(choices) or None]
    letter = _letter_of(without_latex(answer), choices)
    if not letter or letter not in letters:
        raise ValueError(
            f"the answer {answer!r} of this prompt is neither a letter up to {letters[-1]} "
            "nor the text of a choice"
        )
    return letter
