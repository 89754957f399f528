"""All metrics, as `metrics.toml` names them, with their units and meanings."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Metric:
    """A metric's name, chart title, meaning in one line, and unit ("" for a ratio or count)."""

    name: str
    label: str
    meaning: str
    unit: str = ""


_TEXT = (resources.files("spmd_rl.observe") / "metrics.toml").read_text(encoding="utf-8")
METRICS = tuple(Metric(name, **facts) for name, facts in tomllib.loads(_TEXT).items())
METRIC_OF_NAME = {metric.name: metric for metric in METRICS}
