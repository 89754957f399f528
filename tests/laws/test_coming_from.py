"""docs/coming-from.md, algorithms.md, metrics.md: the settings and metrics under "here" exist, and
the names of other programs are those that the command line answers.
"""

from __future__ import annotations

import re

from spmd_rl.algo.config import PolicyConfig
from spmd_rl.config import foreign
from spmd_rl.config.describe import describe
from spmd_rl.controller.run.recipe import load_recipe, shipped_recipes
from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.recipes import grpo
from tests.laws.source import ROOT

PAGE = ROOT / "docs/coming-from.md"
_ROW = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)
_NAME = re.compile(r"`([a-z_./]+)`")
_THEIRS = re.compile(r"`-*([A-Za-z0-9_.-]+)(?:[= ][^`]*)?`")
# columns of data, and a command, in the place of a setting
NO_SETTINGS = {"prompt", "tools", "data_source", "reward_model.ground_truth", "accelerate"}


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


def table(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in a text."""
    is_head = re.compile(r"\| (here|TRL|---)\b|\| ---")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not is_head.match(line)]
    return [line.strip("| ").split(" | ") for line in rows]


def theirs(cell: str) -> list[str]:
    """Return the names in a cell of another program, spelt as in the command line's table."""
    found: list[str] = []
    for name in _THEIRS.findall(cell):
        parent = found[-1].rpartition(".")[0] if name.startswith(".") else ""
        found.append(parent + name.replace("-", "_"))
    return found


def known_settings() -> set[str]:
    return {key.name for name in shipped_recipes() for key in describe(load_recipe(name).config)}


def shown(rows: list[list[str]], row: foreign.Row) -> bool:
    """Whether one or more rows of a page show all that a row of the command line's table has."""
    if row.keys:
        keys = {key.removeprefix("--") for key in row.keys}
        mine = [cells for cells in rows if keys & {*names_in(cells[0]), *theirs(cells[0])}]
    else:
        mine = [["", *cells] for cells in rows if cells[-1] == row.note]
    return all(
        set(theirs_of) <= {name for cells in mine for name in theirs(cells[column])}
        for column, theirs_of in enumerate(row.names, start=1)
    )


def names_in(cell: str) -> list[str]:
    return names(f"| {cell} |")


def test_our_settings_exist() -> None:
    settings = names(section(PAGE.read_text(encoding="utf-8"), "Settings").partition("\n\nA ")[0])
    known = known_settings()
    assert len(settings) > 60
    assert [name for name in settings if name not in known] == []


def test_every_name_that_is_answered_is_on_a_page_with_the_same_answer() -> None:
    coming = section(PAGE.read_text(encoding="utf-8"), "Settings")
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    rows = table(coming) + table(section(page, "Names elsewhere"))
    assert [row for row in foreign.rows() if not shown(rows, row)] == []
    wrong = foreign.Row(("sampling.num_samples",), (("num_completions",), (), ()), "")
    assert not shown(rows, wrong)


def test_every_name_of_the_page_is_answered() -> None:
    ours, _, none = section(PAGE.read_text(encoding="utf-8"), "Settings").partition("\n\nA ")
    cells = [cell for row in table(ours) for cell in row[1:]]
    cells += [cell for row in table(none) for cell in row[:3]]
    asked = [name for cell in cells for name in theirs(cell)]
    known = known_settings() | NO_SETTINGS
    assert len(asked) > 150
    assert [name for name in asked if not foreign.exact(name) and name not in known] == []


def test_what_is_answered_exists() -> None:
    known, tables = known_settings(), {"eval.sampling"}
    keys = {key for row in foreign.rows() for key in row.keys if not key.startswith("--")}
    assert keys - known - tables == set()
    assert all(row.keys or row.note for row in foreign.rows())
    every = [name for row in foreign.rows() for own in row.names for name in own]
    assert len(every) > 200


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
