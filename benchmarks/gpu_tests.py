"""Results of the GPU tests, file by file: passed, failed, skipped, and total seconds.

    python -m pytest tests/gpu --junitxml=runs/gpu.xml
    python -m benchmarks.gpu_tests runs/gpu.xml [more.xml ...] [--save]

A test in several reports counts once, with its worst result.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from benchmarks.ran_files import ALL
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.table import Row

PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
OUTCOMES = ("passed", "skipped", "failed")  # from best to worst


class Test(NamedTuple):
    """One test, or a file that could not be imported or was skipped."""

    file: str
    outcome: str
    seconds: float


def read_tests(*reports: Path) -> list[Test]:
    """Return the tests of the reports, each once.

    A test that fails, and whose teardown fails too, is in its report twice.
    """
    found: dict[str, Test] = {}
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        name = f"{case.get('classname')}.{case.get('name')}".lstrip(".")
        outcomes = [ENDS.get(child.tag, "passed") for child in case]
        before = found.get(name, Test(file_of(name), "passed", 0.0))
        worst = max(before.outcome, *outcomes, "passed", key=OUTCOMES.index)
        found[name] = Test(before.file, worst, before.seconds + float(case.get("time", 0)))
    return list(found.values())


def file_of(name: str) -> str:
    """Return the file of a test: `tests.gpu.kernels.test_rows.test_one[0.5]` is in
    `tests/gpu/kernels/test_rows.py`.
    """
    parts = name.split(".")
    folders = list(takewhile(lambda part: not part.startswith("test_"), parts))
    return "/".join([*folders, parts[len(folders)]]) + ".py"


def rows(tests: list[Test]) -> Iterator[Row]:
    for file in sorted({test.file for test in tests}):
        yield from counts(file, [test for test in tests if test.file == file])
    yield from counts("all", tests, at_least=1)


def counts(what: str, tests: list[Test], at_least: int | None = None) -> Iterator[Row]:
    passed, skipped, failed = (sum(test.outcome == one for test in tests) for one in OUTCOMES)
    yield measured(f"{what}: passed", passed, "tests", at_least=at_least)
    yield measured(f"{what}: failed", failed, "tests", at_most=0)
    yield measured(f"{what}: skipped", skipped, "tests")
    yield measured(f"{what}: time", sum(test.seconds for test in tests), "s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found = list(rows(read_tests(*options.reports)))
    return finish(
        __file__, PACKAGES, found, save=options.save, rooms=ALL, machine=gpu_machine(), **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
