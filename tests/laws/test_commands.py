"""Every command of `spmd-rl` is entered by `main(words)` in a file `command.py` of its room."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from spmd_rl.cli.help import COMMANDS, CommandEntry
from tests.laws.source import Module, package_modules, parse

SIGNATURE = ("main", ["words: list[str]"], "int")


def misplaced(commands: Mapping[str, CommandEntry], modules: Iterable[Module]) -> list[str]:
    """Return the commands whose module is no `command.py` of a room, or has no `main(words)`."""
    named = {module.name: module for module in modules}
    return [
        f"{name}: {entry.module}"
        for name, entry in commands.items()
        if not entry.module.endswith(".command")
        or entry.module not in named
        or SIGNATURE not in signatures(named[entry.module])
    ]


def unlisted(commands: Mapping[str, CommandEntry], modules: Iterable[Module]) -> list[str]:
    """Return the files called `command.py` that no command names."""
    listed = {entry.module for entry in commands.values()}
    return [
        module.name
        for module in modules
        if module.name.endswith(".command") and module.name not in listed
    ]


def signatures(module: Module) -> list[tuple[str, list[str], str]]:
    """Return the name, parameters and return type of every function at the top of a module."""
    return [
        (node.name, ast.unparse(node.args).split(", "), ast.unparse(node.returns or ast.Name("?")))
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef)
    ]


def test_every_command_is_entered_by_main_in_a_command_file() -> None:
    assert misplaced(COMMANDS, package_modules()) == []


def test_every_command_file_is_in_the_table() -> None:
    assert unlisted(COMMANDS, package_modules()) == []


def test_a_misplaced_command_is_seen() -> None:
    good = "def main(words: list[str]) -> int:\n    return 0"
    modules = [
        parse("spmd_rl.plan.command", good),
        parse("spmd_rl.plan.resolve", good),
        parse("spmd_rl.check.command", "def check(words: list[str]) -> int:\n    return 0"),
    ]
    for module, seen in [
        ("spmd_rl.plan.command", False),
        ("spmd_rl.plan.resolve", True),
        ("spmd_rl.check.command", True),
        ("spmd_rl.slurm.command", True),
    ]:
        entry = CommandEntry(module, "", "")
        assert bool(misplaced({"name": entry}, modules)) == seen


def test_an_unlisted_command_file_is_seen() -> None:
    assert unlisted(COMMANDS, [parse("spmd_rl.data.command", "")]) == ["spmd_rl.data.command"]
