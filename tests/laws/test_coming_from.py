"""docs/coming-from.md, algorithms.md, metrics.md: the settings and metrics under "here" exist."""

from __future__ import annotations

import re

from spmd_rl.algo.config import PolicyConfig
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


def test_settings_of_algorithms_exist() -> None:
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    known = {key.name for key in describe(grpo.Config)}
    for title in ("Settings of all algorithms", "KL divergence", "Corrections"):
        settings = names(section(page, title))
        assert len(settings) > 4
        assert [name for name in settings if name not in known] == []
    elsewhere = _NAME.findall(" ".join(_ROW.findall(section(page, "Names elsewhere"))))
    assert [name for name in elsewhere if name not in known] == []


def test_every_setting_of_an_algorithm_has_its_words() -> None:
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    own = {key.name for key in describe(PolicyConfig)}
    assert len(own) > 25
    assert [name for name in own if f"`{name}`" not in page and f"`{name}=" not in page] == []


def test_metrics_of_the_policy_update_exist() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    metrics = names(page)
    assert len(metrics) > 10
    assert [name for name in metrics if name not in METRIC_OF_NAME] == []


def test_names_are_read() -> None:
    page = "\n## A\n| `sampling.top_p`, `.top_k`: both | `x` |\n| other | `y` |\n## B\n"
    assert names(section(page, "A")) == ["sampling.top_p", "sampling.top_k"]
