"""docs/coming-from.md: the settings and metrics in its column "here" exist."""

from __future__ import annotations

import re

from spmd_rl.config.describe import describe
from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.recipes import grpo
from tests.laws.source import ROOT

PAGE = ROOT / "docs/coming-from.md"
_ROW = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)
_NAME = re.compile(r"`([a-z_./]+)`")


def section(page: str, title: str) -> str:
    """Return the text below the heading `title`, up to the next one."""
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names(text: str) -> list[str]:
    """Return the names of the first columns; `.b` after `a.c` stands for `a.b`."""
    found: list[str] = []
    for cell in _ROW.findall(text):
        for name in _NAME.findall(cell):
            parent = found[-1].rpartition(".")[0] if name.startswith(".") else ""
            found.append(parent + name)
    return found


def test_our_settings_exist() -> None:
    settings = names(section(PAGE.read_text(encoding="utf-8"), "Settings"))
    known = {key.name for key in describe(grpo.Config)}
    assert len(settings) > 25
    assert [name for name in settings if name not in known] == []


def test_our_metrics_exist() -> None:
    metrics = names(section(PAGE.read_text(encoding="utf-8"), "Metrics"))
    assert len(metrics) > 20
    assert [name for name in metrics if name not in METRIC_OF_NAME] == []


def test_names_are_read() -> None:
    page = "\n## A\n| `sampling.top_p`, `.top_k`: both | `x` |\n| other | `y` |\n## B\n"
    assert names(section(page, "A")) == ["sampling.top_p", "sampling.top_k"]
