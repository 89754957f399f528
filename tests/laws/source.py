"""The package's source as syntax trees, and the facts that the laws are about."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spmd_rl"


@dataclass(frozen=True)
class Module:
    """One file of the package. `name` is dotted, `room` its first part below the package ("" for
    `__init__`).
    """

    name: str
    tree: ast.Module
    num_lines: int

    @property
    def room(self) -> str:
        return self.name.split(".")[1] if "." in self.name else ""


@dataclass(frozen=True)
class Import:
    """One import statement's target. `lazy`: inside a function; `typing_only`: under `if
    TYPE_CHECKING`.
    """

    target: str
    line: int
    lazy: bool
    typing_only: bool


def parse(name: str, text: str) -> Module:
    return Module(name, ast.parse(text), text.count("\n"))


@functools.cache
def package_modules() -> tuple[Module, ...]:
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(parse(name, path.read_text(encoding="utf-8")))
    return tuple(modules)


@functools.cache
def imports(module: Module) -> tuple[Import, ...]:
    """Every module that `module` imports anywhere; `from a import b` gives `a.b`."""
    return tuple(_imports(module.tree, lazy=False, typing_only=False))


def _imports(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (
                Import(alias.name, child.lineno, lazy, typing_only) for alias in child.names
            )
        elif isinstance(child, ast.ImportFrom):
            yield from (
                Import(f"{child.module}.{alias.name}", child.lineno, lazy, typing_only)
                for alias in child.names
            )
        else:
            inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            guarded = typing_only or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            yield from _imports(child, inside, guarded)


@functools.cache
def functions(module: Module) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in ast.walk(module.tree) if isinstance(node, kinds))


@functools.cache
def calls(module: Module) -> tuple[tuple[str, int], ...]:
    """Every called name as written (`dist.new_group`), with its line."""
    nodes = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return tuple((ast.unparse(node.func), node.lineno) for node in nodes)


def num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
