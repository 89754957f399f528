"""Every package that setup.py asks for, or that a list of ours names, is one that some module
imports.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator

import pytest

from tests.laws.source import ROOT, Module, imports, package_modules, parse
from tests.laws.test_floors import HEAVY

IMPORTED_AS = {
    "pyzmq": "zmq",
    "cupy-cuda13x": "cupy",
    "flash-attn-4": "flash_attn",
    "quack-kernels": "quack",
    "nvidia-cutlass-dsl": "cutlass",
    "megatron-core": "megatron",
    "tokenspeed-deepep": "deep_ep",
    "httptools": "uvicorn",  # uvicorn's parser, which it imports itself
}  # where a distribution's name is not that of its module
TOOLS = ("dev", "docs", "examples")  # extras of what stands beside the package, which uses these
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(setup: str) -> dict[str, list[str]]:
    """What setup.py asks for, by extra; "" is what every installation gets."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(setup))
        if isinstance(node, ast.Call) and name_of(node) == "setup"
    )
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    return {
        "": ast.literal_eval(given["install_requires"]),
        **ast.literal_eval(given["extras_require"]),
    }


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def imported(modules: Iterable[Module]) -> set[str]:
    """Top-level packages that are imported anywhere, `import_module("name")` included."""
    found = set()
    for module in modules:
        found |= {item.target for item in imports(module)}
        found |= {
            name
            for name, function in string_arguments(module.tree)
            if function.endswith("import_module")
        }
    return {name.split(".")[0] for name in found}


def string_arguments(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The first argument of every call that begins with a string, and what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value), name_of(node)


def unused(setup: str, modules: Iterable[Module]) -> list[str]:
    """Requirements that no module imports."""
    used = imported(modules)
    return [
        f"{extra or 'install_requires'}: {requirement}"
        for extra, asked in requirements(setup).items()
        for requirement in asked
        if extra not in TOOLS and module_name(requirement) not in used
    ]


def module_name(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None
    return IMPORTED_AS.get(found[0], found[0].replace("-", "_"))


def test_every_requirement_is_imported() -> None:
    assert unused((ROOT / "setup.py").read_text(encoding="utf-8"), package_modules()) == []


def test_every_heavy_package_is_imported() -> None:
    assert set(HEAVY) - imported(package_modules()) == set()


def test_mypy_passes_over_no_package_that_nobody_imports() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    skipped = [
        name
        for rule in mypy["overrides"]
        if rule.get("ignore_missing_imports")
        for name in rule["module"]
    ]
    assert {name.removesuffix(".*") for name in skipped} - imported(package_modules()) == set()


def test_without_triton_its_tests_are_skipped() -> None:
    code = "import sys, pytest; sys.modules['triton'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    words = ["-q", "--collect-only", "-p", "no:cacheprovider", "tests/unit/kernels", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "could not import 'triton'" in done.stdout


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("import numpy", True),
        ("def f():\n    from flash_attn.cute import interface", False),
        ("importlib.import_module('flash_attn')", False),
    ],
)
def test_an_unused_requirement_is_seen(text: str, seen: bool) -> None:
    extras = "{'gpu': ['flash-attn-4==4.0'], 'dev': ['ruff>=1']}"
    setup = f"setup(install_requires=[], extras_require={extras})"
    found = unused(setup, [parse("spmd_rl.kernels.x", text)])
    assert found == (["gpu: flash-attn-4==4.0"] if seen else [])
