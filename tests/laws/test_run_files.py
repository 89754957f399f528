"""What a recipe writes into its run's folder is checked for links before the run begins."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from spmd_rl.observe.run_folder import WRITTEN_BY_RUN
from tests.laws.source import ROOT, Module, package_modules, parse


def paths_in_run_folder(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """Yield the first name, or the code, of each path that is made below a `run_folder`."""
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
                continue
            folder = ast.unparse(node.left).rpartition(".")[2]
            if folder in ("run_folder", "_run_folder"):
                yield module.name, _name(node.right)


def _name(right: ast.expr) -> str:
    is_text = isinstance(right, ast.Constant) and isinstance(right.value, str)
    return right.value.partition("/")[0] if is_text else ast.unparse(right)  # type: ignore[attr-defined]


def unchecked(modules: Iterable[Module]) -> list[tuple[str, str]]:
    return [found for found in paths_in_run_folder(modules) if found[1] not in WRITTEN_BY_RUN]


def examples() -> list[Module]:
    files = sorted((ROOT / "examples").rglob("*.py"))
    return [parse(str(path), path.read_text(encoding="utf-8")) for path in files]


def test_what_recipes_write_is_checked_for_links() -> None:
    modules = [*package_modules(), *examples()]
    names = {name for _, name in paths_in_run_folder(modules)}
    assert {"hf", "sft.jsonl", "eval.json", "metrics.jsonl"} <= names
    assert unchecked(modules) == []


def test_another_file_is_seen() -> None:
    planted = parse("spmd_rl.recipes.planted", 'open(ctl.run_folder / "mine/a.txt", "w")\nx / "y"')
    assert unchecked([planted]) == [("spmd_rl.recipes.planted", "mine")]
    by_name = parse("spmd_rl.recipes.planted", "file = self._run_folder / NAME")
    assert unchecked([by_name]) == [("spmd_rl.recipes.planted", "NAME")]
