"""Rows of the GPU tests, made from the report that pytest writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_tests

TESTS = """
import pytest

@pytest.fixture
def sticky():
    yield
    raise ValueError

class TestMore:
    def test_one(self): pass

@pytest.mark.parametrize("share", [0.5, 1.5])
def test_share(share): assert share < 1

def test_twice_wrong(sticky): assert False

def test_not_cleaned_up(sticky): pass

@pytest.mark.skip
def test_later(): pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    texts = {"kernels/test_planted": TESTS, "test_absent": "import no_such_module"}
    for name, text in texts.items():
        path = folder / f"tests/gpu/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    options = "--import-mode=importlib --continue-on-collection-errors -p no:cacheprovider".split()
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--junitxml=report.xml", *options]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
    return folder / "report.xml"


def test_each_test_counts_once(report: Path) -> None:
    found = {row.what: row for row in gpu_tests.rows(gpu_tests.read_tests(report))}
    ends = ("passed", "failed", "skipped")
    assert {
        file: [found[f"{file}: {end}"].value for end in ends]
        for file in ("tests/gpu/kernels/test_planted.py", "tests/gpu/test_absent.py", "all")
    } == {
        "tests/gpu/kernels/test_planted.py": [2, 3, 1],
        "tests/gpu/test_absent.py": [0, 1, 0],
        "all": [2, 4, 1],
    }
    assert len(found) == 3 * 4
    assert found["all: failed"].holds is False


def test_a_report_of_no_tests_misses_its_bar(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text('<testsuites><testsuite tests="0"/></testsuites>')
    rows = list(gpu_tests.rows(gpu_tests.read_tests(tmp_path / "report.xml")))
    assert [row.holds for row in rows] == [False, True, None, None]


def test_several_reports_are_one(report: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.xml"
    case = '<testcase classname="tests.gpu.train.test_more" name="test_it" time="2"/>'
    other.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    one, both = (gpu_tests.read_tests(*reports) for reports in ([report], [report, other, report]))
    assert len(both) == len(one) + 1
    assert sum(test.outcome == "passed" for test in both) == 3
    assert sum(test.seconds for test in both) >= 2
