"""Charts of known metrics, as `panels.toml` names them: which lines share a chart.

The lines of one chart have one unit, because they share one axis.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from spmd_rl.report.pictures.colours import LINES, NAMED, Colour

LEVEL = 0.01  # change of a value, as a share of it, that a chart from 0 does not show


class Line(NamedTuple):
    """A metric of a chart, its label in the legend, and its colour if not that of its place."""

    metric: str
    label: str
    colour: Colour | None = None


@dataclass(frozen=True)
class Panel:
    """A chart. Its `lines` have the colours of their places.

    The axis begins at 0 or below if it is `from_zero`. With `share` it ends at 1; with `whole` it
    holds the outliers too. Lines whose values all stay below `noise` are 0 but for rounding. A
    `main` chart is in `curves.png` too; that it does not change may be news.
    """

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    from_zero: bool = True
    share: bool = False
    whole: bool = False
    stacked: bool = False
    noise: float = 0.0
    main: bool = False
    news_if_flat: bool = False

    @classmethod
    def of(cls, lines: Sequence[Sequence[str]], **layout: Any) -> Panel:
        """Return the panel of a table whose lines have the names of their colours."""
        named = (
            Line(metric, label, *(NAMED[name] for name in colour))
            for metric, label, *colour in lines
        )
        return cls(lines=tuple(named), **layout)

    def colour(self, place: int) -> Colour:
        return self.lines[place].colour or LINES[place]


_TEXT = (resources.files("spmd_rl.report") / "panels.toml").read_text(encoding="utf-8")
TABLES = tomllib.loads(_TEXT)
PANELS = tuple(Panel.of(**table) for table in TABLES["charts"])
PANEL_OF_METRIC = {line.metric: panel for panel in PANELS for line in panel.lines}
PHASES = {
    line.label: panel.colour(place)
    for panel in PANELS
    for place, line in enumerate(panel.lines)
    if panel.stacked
}
