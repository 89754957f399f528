"""Kinds of instruction that can be checked, under the names that IFEval gives them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

WORDS = (
    "morning, careful, together, window, simple, journey, quiet, winter, learn, colour, stone, "
    "bright, neighbour, patient, golden, memory, silence, wonder, weather, strong"
).split(", ")
ENDINGS = (
    "That is all.",
    "Thank you for reading.",
    "I hope this helps.",
    "Ask me if you want to know more.",
    "And so it goes.",
    "Now it is your turn.",
)
POSTSCRIPTS = ("P.S.", "P.P.S")

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of instruction. `draw` returns the arguments of its check. A phrasing has the names of
    arguments in braces; a list is written as words in quotation marks.
    """

    name: str
    phrasings: tuple[str, ...]
    draw: Callable[[random.Random], Arguments] = lambda rng: {}


@dataclass(frozen=True)
class Instruction:
    """An instruction as a sentence, with what checks it."""

    kind: str
    arguments: Arguments
    text: str


def _keywords(rng: random.Random) -> Arguments:
    return {"keywords": sorted(rng.sample(WORDS, 2))}


def _num_words(rng: random.Random) -> Arguments:
    relation = rng.choice(("less than", "at least"))
    return {"relation": relation, "num_words": rng.randrange(25, 65, 5)}


def _num_sentences(rng: random.Random) -> Arguments:
    relation = rng.choice(("less than", "at least"))
    return {"relation": relation, "num_sentences": rng.randint(3, 5)}


TRAINING = (
    Kind(
        "keywords:existence",
        (
            "Use the words {keywords}.",
            "The words {keywords} have to be in your answer.",
            "Include the keywords {keywords}.",
        ),
        _keywords,
    ),
    Kind(
        "length_constraints:number_words",
        (
            "Answer with {relation} {num_words} words.",
            "Your answer should have {relation} {num_words} words.",
            "Write {relation} {num_words} words.",
        ),
        _num_words,
    ),
    Kind(
        "detectable_format:number_bullet_lists",
        (
            "Your answer must have exactly {num_bullets} bullet points, such as: * This is one.",
            "Give exactly {num_bullets} bullet points, and begin each of them with an asterisk.",
            "Use markdown bullets, and exactly {num_bullets} of them: * like this.",
        ),
        lambda rng: {"num_bullets": rng.randint(2, 5)},
    ),
    Kind(
        "detectable_format:title",
        (
            "Give your answer a title in double angular brackets, such as <<a good day>>.",
            "Your answer must have a title, wrapped like this: <<title>>.",
            "Begin with a title between << and >>.",
        ),
    ),
    Kind(
        "startend:end_checker",
        (
            'End with the exact words "{end_phrase}" and write nothing after them.',
            'The last words of your answer must be "{end_phrase}"',
            'Finish your answer with this sentence: "{end_phrase}"',
        ),
        lambda rng: {"end_phrase": rng.choice(ENDINGS)},
    ),
    Kind(
        "startend:quotation",
        (
            "Wrap your whole answer in double quotation marks.",
            "Put double quotation marks around the entire answer.",
            "Your answer must begin and end with a double quotation mark.",
        ),
    ),
    Kind(
        "punctuation:no_comma",
        (
            "Do not use any commas.",
            "Your answer must not contain a comma.",
            "Write without commas.",
        ),
    ),
)
HELD_OUT = (
    Kind(
        "change_case:english_lowercase",
        (
            "Write in lowercase letters only.",
            "Your answer must be in English and have no capital letters.",
        ),
    ),
    Kind(
        "change_case:english_capital",
        (
            "Write in capital letters only.",
            "Your answer must be in English and in all capital letters.",
        ),
    ),
    Kind(
        "detectable_content:postscript",
        (
            "Add a postscript at the end that begins with {postscript_marker}",
            "After your answer, write a postscript. Begin it with {postscript_marker}",
        ),
        lambda rng: {"postscript_marker": rng.choice(POSTSCRIPTS)},
    ),
    Kind(
        "detectable_format:number_highlighted_sections",
        (
            "Highlight at least {num_highlights} parts with markdown, such as *this part*.",
            "Put asterisks around at least {num_highlights} phrases: *like this*.",
        ),
        lambda rng: {"num_highlights": rng.randint(1, 3)},
    ),
    Kind(
        "length_constraints:number_sentences",
        (
            "Answer with {relation} {num_sentences} sentences.",
            "Your answer should have {relation} {num_sentences} sentences.",
        ),
        _num_sentences,
    ),
)
# a quotation mark before a bullet or a title is hard to place
APART = (
    {"startend:quotation", "detectable_format:number_bullet_lists"},
    {"startend:quotation", "detectable_format:title"},
)
PAIRS_AND_TRIPLES = tuple(
    chosen
    for size in (2, 3)
    for chosen in combinations(TRAINING, size)
    if not any(apart <= {kind.name for kind in chosen} for apart in APART)
)


def instruction(kind: Kind, rng: random.Random) -> Instruction:
    """Return an instruction of a kind, with arguments and a phrasing of its own."""
    arguments = kind.draw(rng)
    shown = {name: _in_words(value) for name, value in arguments.items()}
    return Instruction(kind.name, arguments, rng.choice(kind.phrasings).format(**shown))


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(f'"{word}"' for word in value)
    return str(value)
