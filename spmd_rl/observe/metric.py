"""Metric: a name with what a page of metrics shows of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric's name, unit ("" for a ratio or count), chart title, and meaning in one line."""

    name: str
    unit: str
    label: str
    meaning: str
