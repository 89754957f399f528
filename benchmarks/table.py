"""Printing of every committed benchmark result as one markdown table.

    python -m benchmarks.table [--stale]

A result is `benchmarks/results/<machine>/<script>.json`, whose schema is `Result` below. --stale
lists the results whose files of spmd_rl have changed since they were measured, or are not known.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from benchmarks.ran_files import RanFiles, digest_of

RESULTS = Path(__file__).parent / "results"
HEADER = ("machine", "benchmark", "what", "value", "peer", "ratio", "bar", "holds")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Row(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One claim: a measurement, with its peer and its bar if it has them.

    `ratio` is value over peer_value. The script computes `holds`, which is null without a bar.
    """

    what: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    bar: str | None = None
    holds: bool | None = None


class Code(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The code that was measured.

    `dirty` is whether files differed from the commit, null if that was not recorded. Files that are
    older than this record have `filled_in`: what was found in git's history, and how. `ran` has
    the files that were run; older ones have a digest of the folder `kernels` instead.
    """

    commit: str
    dirty: bool | None
    ran: RanFiles | None = None
    kernels: str | None = None
    filled_in: str | None = None


class Result(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Results of one script on one machine on one day, with the code and versions it ran on."""

    script: str
    date: str
    machine: str
    code: Code
    versions: dict[str, str]
    rows: list[Row]


def read_results(folder: Path) -> list[Result]:
    """Return all results below `folder`, by machine and script.

    Raises: ValueError naming the file that does not fit.
    """
    return [_read(path) for path in sorted(folder.glob("*/*.json"))]


def stale(results: Iterable[Result]) -> Iterator[str]:
    """Yield a line for each result that need not be that of this code."""
    for one in results:
        ran = one.code.ran
        if ran is None or digest_of(ran.files) != ran.digest:
            why = "what it ran is not recorded" if ran is None else "files that it ran have changed"
            yield f"{one.machine}/{Path(one.script).stem} of {one.date}: {why}"


def table(results: Iterable[Result]) -> str:
    """Return the markdown table of all rows."""
    body = [_cells(result, row) for result in results for row in result.rows]
    rule = tuple("--:" if name in ("value", "ratio") else "---" for name in HEADER)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (HEADER, rule, *body))


def problems(path: Path, result: Result) -> Iterator[str]:
    """Yield the problems that the types alone do not catch."""
    if path.parent.name != result.machine:
        yield f"machine is {result.machine!r}, the folder is {path.parent.name!r}"
    if path.stem != Path(result.script).stem:
        yield f"script is {result.script!r}, the file is {path.name!r}"
    if not _COMMIT.fullmatch(result.code.commit):
        yield f"code.commit is {result.code.commit!r}: write the full hash of the measured commit"
    for row in result.rows:
        if (row.bar is None) != (row.holds is None):
            yield f"{row.what!r}: a bar and whether it holds belong together"
        if (row.peer is None) != (row.peer_value is None):
            yield f"{row.what!r}: a peer and its value belong together"
        if (
            row.ratio is not None
            and row.peer_value
            and abs(row.value / row.peer_value - row.ratio) > 0.01 * abs(row.ratio)
        ):
            yield f"{row.what!r}: the ratio is not value over peer_value"


def _read(path: Path) -> Result:
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error
    for problem in problems(path, result):
        raise ValueError(f"{path}: {problem}")
    return result


def _cells(result: Result, row: Row) -> tuple[str, ...]:
    peer = f"{row.peer} {_number(row.peer_value)}" if row.peer is not None else ""
    holds = {True: "yes", False: "**no**", None: ""}[row.holds]
    value = f"{_number(row.value)} {row.unit}".strip()
    return (
        result.machine,
        result.script,
        row.what,
        value,
        peer,
        _number(row.ratio),
        row.bar or "",
        holds,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"


def main() -> int:
    try:
        results = read_results(RESULTS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(stale(results)) if "--stale" in sys.argv[1:] else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
