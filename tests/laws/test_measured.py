"""The tables of README, docs/measured.md, docs/algorithms.md and of the lab note with earlier
figures say what the files under benchmarks/results say, figure by figure.

A row's link leads to its file, and the link's title names rows of that file: patterns with " + "
between them and, behind a ";", those of what stands beside, where it is not their peers. The
figures follow in that order: the column "peer" has the peers' behind a colon, "ratio" the values
over them, and all others behind the link have values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.table import RESULTS, Code, Result, Row, read_results
from tests.laws.source import ROOT

_LINK = re.compile(r'\]\((\S+) "([^"]+)"\)')
_FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
_VERSION = re.compile(r"\d+(?:\.\d+)+")
OTHERS = ("peer", "ratio")
FOLDER = "benchmarks/results/"
EARLIER = ROOT / "docs/lab-notes/2026-11-26-figures-before-files-were-named.md"
PAGES = (ROOT / "README.md", ROOT / "docs/measured.md", ROOT / "docs/algorithms.md", EARLIER)
FILES_NAMED = "2026-11-27"  # the day from which results name the files that ran


class Line(NamedTuple):
    """A row of a table: the columns' names, and what stands in them."""

    names: list[str]
    cells: list[str]


def measured_lines(text: str) -> list[Line]:
    """The rows of all tables in which any row links to a result."""
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [line for table in tables if FOLDER in table for line in table_lines(table)]


def table_lines(table: str) -> list[Line]:
    names, _, *body = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    )
    return [Line(names, cells) for cells in body]


LINES = [line for page in PAGES for line in measured_lines(page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    found = read_results(RESULTS)
    return {f"benchmarks/results/{one.machine}/{Path(one.script).stem}.json": one for one in found}


def from_root(link: str) -> str:
    """Return the path of a result file, as seen from the root, of a link in any page."""
    return link.replace("../", "")


def problems(line: Line, results: dict[str, Result]) -> list[str]:
    """What a line says that its file does not, or the other way round."""
    linked = linked_cell(line)
    file, title = next(
        iter(_LINK.findall(line.cells[linked] if linked is not None else "")), ("", "")
    )
    file = from_root(file)
    if linked is None or file not in results:
        return [f"{line.cells[0]!r} has no link to the file that it is from"]
    ours, *others = (chosen(results[file].rows, patterns) for patterns in title.split("; "))
    cells = dict.fromkeys(OTHERS, "") | dict(zip(line.names, line.cells, strict=True))
    own = " ".join(cells[name] for name in line.names[linked + 1 :] if name not in OTHERS)
    names, _, beside = cells["peer"].rpartition(":")
    values, peers, ratios = expected(ours, others[0] if others else None, own)
    found = [
        f"{name} is no version of {file}"
        for name in _VERSION.findall(names)
        if not ran(results[file], name)
    ]
    for text, numbers in (own, values), (beside, peers), (cells["ratio"], ratios):
        figures = _FIGURE.findall(text)
        if len(figures) != len(numbers) or not all(map(shows, figures, numbers)):
            found.append(f"{text!r} of {line.cells[linked]!r} should say {numbers}")
    return found


def linked_cell(line: Line) -> int | None:
    return next((at for at, cell in enumerate(line.cells) if _LINK.search(cell)), None)


def chosen(rows: list[Row], patterns: str) -> list[Row]:
    """Those that each pattern fits, pattern by pattern; a row with a peer is called "what beside
    peer".
    """
    labels = [
        (row.what if row.peer is None else f"{row.what} beside {row.peer}", row) for row in rows
    ]
    return [
        row
        for pattern in patterns.split(" + ")
        for label, row in labels
        if fnmatchcase(label, pattern)
    ]


def expected(
    ours: list[Row], others: list[Row] | None, text: str
) -> tuple[list[float], list[float], list[float]]:
    """Values, what stands beside them, and ratios, in the units that `text` uses."""
    values = [number for row in ours for number in (row.value * scale(row, text), *parts(row))]
    pairs = [(row, row.peer_value) for row in ours if row.peer_value is not None]
    if others is not None:
        beside = [row.value for row in others]
        pairs = list(zip(ours, beside * len(ours) if len(beside) == 1 else beside, strict=True))
        return values, beside, [row.value / peer for row, peer in pairs]
    return (
        values,
        [peer * scale(row, text) for row, peer in pairs],
        [row.value / peer for row, peer in pairs],
    )


def scale(row: Row, text: str) -> float:
    if row.unit == "" and "%" in text:
        return 100
    return 1e-3 if row.unit == "us" and " ms" in text else 1


def parts(row: Row) -> list[float]:
    """120 of a row that is so many "of 120"."""
    return (
        [float(row.unit.removeprefix("of "))]
        if row.unit.startswith("of ") and row.unit[3:].isdigit()
        else []
    )


def shows(figure: str, number: float) -> bool:
    """Whether `figure` is the number rounded to the digits shown; of a tie, either way."""
    return abs(float(figure.replace(",", "")) - number) <= 0.5000001 * unit_of(figure)


def unit_of(figure: str) -> float:
    return 10.0 ** -len(figure.partition(".")[2])


def ran(result: Result, number: str) -> bool:
    return any(f"{one}.".startswith(f"{number}.") for one in result.versions.values())


def changed(line: Line) -> Iterator[Line]:
    """The line with any one of the figures behind its link two off in the last digit shown."""
    linked = linked_cell(line)
    for at in range(len(line.cells) if linked is None else linked + 1, len(line.cells)):
        for one in _FIGURE.finditer(line.cells[at]):
            off = float(one[0].replace(",", "")) + 2 * unit_of(one[0])
            other = f"{off:.{len(one[0].partition('.')[2])}f}"
            cell = line.cells[at][: one.start()] + other + line.cells[at][one.end() :]
            yield Line(line.names, [*line.cells[:at], cell, *line.cells[at + 1 :]])


def test_every_figure_is_that_of_its_file(results: dict[str, Result]) -> None:
    assert len(LINES) > 20
    assert [problem for line in LINES for problem in problems(line, results)] == []


def test_any_changed_figure_is_seen(results: dict[str, Result]) -> None:
    others = [other for line in LINES for other in changed(line)]
    assert len(others) > 100
    assert [other.cells for other in others if not problems(other, results)] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/measured.md", EARLIER])
def test_only_the_lab_note_quotes_results_that_name_no_files(
    page: Path, results: dict[str, Result]
) -> None:
    lines = measured_lines(page.read_text(encoding="utf-8"))
    files = {from_root(file) for line in lines for file, _ in _LINK.findall("".join(line.cells))}
    early = {file for file in files if results[file].date < FILES_NAMED}
    assert early == (files if page == EARLIER else set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_page_has_figures(page: Path) -> None:
    assert len(measured_lines(page.read_text(encoding="utf-8"))) >= 5


PLANTED = Row(what="step", value=1500, unit="us", peer="torch", peer_value=3000)
CODE = Code(commit="c" * 40, dirty=False)
RESULT = Result(
    script="x.py", date="", machine="m", code=CODE, versions={"torch": "2.11.0"}, rows=[PLANTED]
)
HEAD = "| what | ours | peer | ratio |\n| --- | --- | --- | --- |\n"


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ('| [a step](f.json "step*") | 1.50 ms | torch 2.11: 3.0 | 0.5 |', True),
        ('| [a step](../f.json "step*") | 1.50 ms | torch 2.11: 3.0 | 0.5 |', True),
        ('| [a step](f.json "step*") | 1.50 ms | torch 2.1: 3.0 | 0.5 |', False),
        ('| [a step](f.json "step*") | 1.50 s | torch: 3.0 | 0.5 |', False),
        ('| [a step](f.json "step*") | 1.50 ms | | |', False),
        ('| [a step](f.json "step*") | 1.50 / 1.50 ms | torch: 3.0 | 0.5 |', False),
        ('| [a step](f.json "leap*") | 1.50 ms | torch: 3.0 | 0.5 |', False),
        ('| [a step](g.json "step*") | 1.50 ms | torch: 3.0 | 0.5 |', False),
        ("| a step | 1.50 ms | torch: 3.0 | 0.5 |", False),
    ],
)
def test_a_line_without_its_source_or_with_another_is_seen(row: str, right: bool) -> None:
    (line,) = table_lines(f"{HEAD}{row}\n")
    assert (problems(line, {"f.json": RESULT}) == []) is right


def test_a_row_beside_one_that_links_needs_a_link() -> None:
    row = f'| [a step](../{FOLDER}m/f.json "step*") | 1.50 ms | | |\n'
    assert len(measured_lines(f"{HEAD}{row}| another | 2 ms | | |\n")) == 2
    assert measured_lines(f"{HEAD}| another | 2 ms | | |\n") == []
