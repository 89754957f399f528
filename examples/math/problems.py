"""Word problems of grade-school arithmetic, made from templates, and how a teacher solves them.

A template has a text with names, things and numbers, and the steps that solve it. Some problems
also tell a number that does not matter. Templates of the evaluation appear nowhere in the training
data, but need the same steps.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAMES = ("Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon")
THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "stones")
DISTRACTORS = (
    "{a} is {d} years old.",
    "It is {d} o'clock.",
    "{b} lives {d} miles away.",
    "{a} has {d} cousins.",
)
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(frozen=True)
class Template:
    """A problem: its text, and the steps, each "left sign right"; "_" is the result before it."""

    text: str
    steps: tuple[str, ...]


TRAINING = (
    Template("{a} has {x} {t}. {b} gives {a} {y} more. How many {t} does {a} have?", ("x + y",)),
    Template("{a} finds {x} {t} and then {y} {t}. How many {t} is that?", ("x + y",)),
    Template("{a} has {x} {t} and loses {y}. How many {t} are left?", ("x - y",)),
    Template("{a} has {x} {t}. {b} takes {y} of them. How many are left?", ("x - y",)),
    Template("{a} has {x} bags with {y} {t} in each. How many {t} is that?", ("x * y",)),
    Template("{a} packs {x} boxes with {y} {t} each. How many {t} are packed?", ("x * y",)),
    Template(
        "{a} has {x} bags with {y} {t} in each and {z} more {t}. How many {t} is that?",
        ("x * y", "_ + z"),
    ),
    Template(
        "{a} has {x} {t} and finds {y} more. Then {a} loses {z}. How many are left?",
        ("x + y", "_ - z"),
    ),
)
HELD_OUT = (
    Template("{b} gives {a} {y} {t}. Before, {a} had {x}. How many does {a} have?", ("x + y",)),
    Template("Of {x} {t}, {a} loses {y}. How many {t} are left?", ("x - y",)),
    Template("In each of {x} bags {a} has {y} {t}. How many {t} is that?", ("x * y",)),
    Template(
        "{a} packs {x} boxes with {y} {t} each and has {z} more. How many {t} is that?",
        ("x * y", "_ + z"),
    ),
)


@dataclass(frozen=True)
class Problem:
    """A question, the worked steps such as "3 * 4 = 12", and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int


def problem(template: Template, rng: random.Random, distraction: float = 0.3) -> Problem:
    """Return a problem of a template; at chance `distraction` with a needless number."""
    while True:
        numbers = {name: rng.randint(2, 12) for name in "xyzd"}
        solved = solve(template.steps, numbers)
        if solved.answer >= 0 and all(int(step.split("= ")[1]) >= 0 for step in solved.steps):
            break
    names = rng.sample(NAMES, 2)
    words = {"a": names[0], "b": names[1], "t": rng.choice(THINGS)} | numbers
    text = template.text.format(**words)
    if rng.random() < distraction:
        text = f"{rng.choice(DISTRACTORS).format(**words)} {text}"
    return Problem(text, solved.steps, solved.answer)


def solve(steps: Sequence[str], numbers: dict[str, int], slip: int = 0) -> Problem:
    """Return the worked steps. `slip` is added to the first result, as by a careless teacher."""
    worked, result = [], 0
    for number, step in enumerate(steps):
        left, sign, right = step.split()
        one = result if left == "_" else numbers[left]
        other = numbers[right]
        result = OPERATORS[sign](one, other) + (slip if number == 0 else 0)
        worked.append(f"{one} {sign} {other} = {result}")
    return Problem("", tuple(worked), result)


def solution(solved: Problem) -> str:
    """Return what a teacher writes: the steps, and the answer in a box."""
    return f"{', '.join(solved.steps)}. \\boxed{{{solved.answer}}}"


def careless(solved: Problem, rng: random.Random) -> str:
    """Return the solution with a mistake: a wrong result, or the last step left out."""
    if len(solved.steps) > 1 and rng.random() < 0.5:
        return solution(Problem("", solved.steps[:-1], int(solved.steps[-2].split("= ")[1])))
    wrong = solved.answer + rng.choice((-2, -1, 1, 2, 10))
    last = solved.steps[-1].split("= ")[0] + f"= {wrong}"
    return solution(Problem("", (*solved.steps[:-1], last), wrong))
