"""Colours of lines, which `curves.png` and the report page share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """A colour for matplotlib, and the variable of the style sheet that holds it on the page."""

    code: str
    variable: str


NAMED = {
    "blue": Colour("#2667c9", "--c0"),
    "amber": Colour("#d07010", "--c1"),
    "green": Colour("#0b7a5b", "--c2"),
    "violet": Colour("#4a2b73", "--c3"),
    "purple": Colour("#8a1cf5", "--c4"),
    "maroon": Colour("#7a1d12", "--c5"),
    "pink": Colour("#c765b0", "--c6"),
    "olive": Colour("#8f8848", "--c7"),
    "red": Colour("#c22f45", "--alarm"),
    "grey": Colour("#a7b1ba", "--rest"),
}
# of the lines of one chart, in their order; they differ in lightness too, for colour-blind readers
LINES = tuple(NAMED.values())[:8]
CODES = {colour.variable: colour.code for colour in NAMED.values()}
