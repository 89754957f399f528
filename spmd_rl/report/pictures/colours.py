"""Colours of lines and phases, which `curves.png` and the report page share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """A colour for matplotlib, and the variable of the style sheet that holds it on the page."""

    code: str
    variable: str


BLUE, AMBER = Colour("#2667c9", "--c0"), Colour("#d07010", "--c1")
GREEN, VIOLET = Colour("#0b7a5b", "--c2"), Colour("#4a2b73", "--c3")
PURPLE, MAROON = Colour("#8a1cf5", "--c4"), Colour("#7a1d12", "--c5")
PINK, OLIVE = Colour("#c765b0", "--c6"), Colour("#8f8848", "--c7")
RED, GREY = Colour("#c22f45", "--alarm"), Colour("#a7b1ba", "--rest")

# of the lines of one chart, in their order; they differ in lightness too, for colour-blind readers
LINES = (BLUE, AMBER, GREEN, VIOLET, PURPLE, MAROON, PINK, OLIVE)
PHASES = {
    "rollout": BLUE,
    "train": AMBER,
    "sync": GREEN,
    "sleep": VIOLET,
    "wake": PURPLE,
    "eval": MAROON,
    "other": GREY,
}
