"""Tests that need a GPU run seldom: mypy checks their calls, and every machine imports them."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.laws.source import ROOT

FOLDER = ROOT / "tests/gpu"
ALLOWED = ("pytest.importorskip('triton')",)  # the extra "dev" installs it
PLANTED = """
def product(x: int) -> int:
    return x


def test_product(rows):
    assert product(1) == product(x=1)
    assert product(1, 2)
    assert product("1")
    assert product()
"""


def checked(source: str, tmp_path: Path) -> list[str]:
    """Return the lines and codes of mypy's errors in a file of tests/gpu that says `source`."""
    planted, name = tmp_path / "planted.py", "tests/gpu/recipes/hang.py"
    planted.write_text(source)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    command += ["--shadow-file", name, str(planted), "-m", "tests.gpu.recipes.hang"]
    found = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False).stdout
    return [
        f"{line.split(':')[1]} {line.split()[-1]}"
        for line in found.splitlines()
        if line.startswith(name)
    ]


def test_mypy_sees_a_wrong_call_in_a_test_without_types(tmp_path: Path) -> None:
    assert checked(PLANTED, tmp_path) == ["8 [call-arg]", "9 [arg-type]", "10 [call-arg]"]


def test_mypy_checks_all_of_tests_gpu() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["packages"] == ["spmd_rl", "tests.gpu"]
    assert not {"exclude", "disable_error_code"} & settings.keys()
    own = [
        one
        for one in settings["overrides"]
        if any(name.startswith("tests.gpu") for name in one["module"])
    ]
    assert [sorted(one.keys() - {"module"}) for one in own] == [
        ["disallow_incomplete_defs", "disallow_untyped_decorators", "disallow_untyped_defs"]
    ]


def self_skips(source: str) -> list[str]:
    """Return the calls that make a module skip itself at import, but for those in `ALLOWED`."""
    at_import = [
        node
        for statement in ast.parse(source).body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    ]
    calls = [ast.unparse(node) for node in at_import]
    return [
        call
        for call in calls
        if call.startswith(("pytest.skip(", "pytest.importorskip(")) and call not in ALLOWED
    ]


def test_every_module_of_tests_gpu_is_imported_where_there_is_no_gpu() -> None:
    modules = sorted(FOLDER.rglob("*.py"))
    assert len(modules) > 40
    found = {str(path.relative_to(ROOT)): self_skips(path.read_text()) for path in modules}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\nmegatron = pytest.importorskip('megatron.core')",
        "import pytest\nif not GPUS:\n    pytest.skip('no GPU', allow_module_level=True)",
    ],
)
def test_a_module_that_skips_itself_is_found(source: str) -> None:
    assert len(self_skips(source)) == 1
    assert self_skips("import pytest\npytest.importorskip('triton')") == []
