"""Output of a benchmark script: its rows on the terminal and, with --save, a file in results/."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from benchmarks.measured_code import COMMIT_ENV, measured_code
from benchmarks.ran_files import joined
from benchmarks.table import RESULTS, Result, Row, table

MACHINE = "laptop"


def compared(
    what: str,
    value: float,
    unit: str,
    *,
    peer: str,
    peer_value: float,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Return a row beside a peer. `at_most` and `at_least` are bars on value over peer_value."""
    ratio = value / peer_value
    bars: list[tuple[str, bool]] = []
    if at_least is not None:
        bars.append((f">= {at_least:.3g}x", ratio >= at_least))
    if at_most is not None:
        bars.append((f"<= {at_most:.3g}x", ratio <= at_most))
    bar = " and ".join(text for text, _ in bars) or None
    holds = all(held for _, held in bars) if bars else None
    return Row(
        what=what,
        value=_short(value),
        unit=unit,
        peer=peer,
        peer_value=_short(peer_value),
        ratio=_short(ratio),
        bar=bar,
        holds=holds,
    )


def measured(
    what: str,
    value: float,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Return a row without a peer. `at_most` or `at_least` is the bar on the value."""
    bar, holds = None, None
    if at_most is not None:
        bar, holds = f"<= {at_most:g} {unit}".strip(), value <= at_most
    elif at_least is not None:
        bar, holds = f">= {at_least:g} {unit}".strip(), value >= at_least
    return Row(what=what, value=_short(value), unit=unit, bar=bar, holds=holds)


def counted(what: str, each: Sequence[bool], *, all_must: bool = True) -> Row:
    """Return a row that counts the true values. With `all_must`, its bar is all of them."""
    held = sum(each)
    bar, holds = ("all", held == len(each)) if all_must else (None, None)
    return Row(what=what, value=held, unit=f"of {len(each)}", bar=bar, holds=holds)


def gpu() -> dict[str, str]:
    """Return the first GPU, its driver and torch's cuBLAS, for the versions of a result."""
    from spmd_rl.kernels.contract import cublas_version

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver, "cublas": cublas_version()}


def gpu_machine() -> str:
    """Return the folder of results of the first GPU: "h100" or "h200"."""
    words = gpu()["gpu"].split()
    return next(word for word in words if word != "NVIDIA").lower()


def finish(
    script: str,
    packages: Iterable[str],
    rows: list[Row],
    *,
    save: bool,
    machine: str = MACHINE,
    rooms: Iterable[str] = (),
    **versions: str,
) -> int:
    """Print the rows and, with `save`, write them. Returns 1 if a bar is missed, else 0.

    A benchmark may be run in parts: the file keeps other rows of the same day, code and versions.
    `rooms` are those of spmd_rl that ran in other processes. `versions` are those of software that
    is not installed as a package here.
    """
    result = Result(
        script=Path(script).name,
        date=datetime.now(UTC).date().isoformat(),
        machine=machine,
        code=measured_code(rooms),
        versions={name: version(name) for name in packages} | versions,
        rows=rows,
    )
    print(table([result]))
    if save:
        path = RESULTS / machine / f"{Path(script).stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        result.rows = [*_other_rows(path, result), *rows]
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        if not result.code.commit:
            print(
                f"{path}: no commit is known here: write it into code.commit (or set {COMMIT_ENV})",
                file=sys.stderr,
            )
    return int(any(row.holds is False for row in rows))


def _other_rows(path: Path, result: Result) -> list[Row]:
    """Return the rows of a file of the same day, code and versions, but for those of `result`.

    The files that those rows ran are added to those of `result`.
    """
    if result.code.dirty is not False or not path.exists():
        return []
    earlier = msgspec.json.decode(path.read_bytes(), type=Result)
    before, now = earlier.code.ran, result.code.ran
    code = msgspec.structs.replace(earlier.code, ran=now)
    if before is None or now is None:
        return []
    if msgspec.structs.replace(earlier, rows=result.rows, code=code) != result:
        return []
    result.code.ran = joined(before, now)
    measured_again = {row.what for row in result.rows}
    return [row for row in earlier.rows if row.what not in measured_again]


def _short(value: float) -> float:
    """Round a measurement to four digits; a count is kept."""
    return value if float(value).is_integer() else float(f"{value:.4g}")
