"""A role declares what it can do through a protocol: the controller never looks for its methods by
name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from spmd_rl.controller.capabilities import CAPABILITIES
from tests.laws.source import Module, package_modules, parse

METHODS = {name for protocol in CAPABILITIES for name in vars(protocol) if name[0] != "_"}


def looked_up_by_name(modules: Iterable[Module]) -> list[str]:
    """Every place in `controller/` that asks by its name whether an object has such a method."""
    return [
        f"{module.name}:{node.lineno} looks up {name}"
        for module in modules
        if module.room == "controller"
        for node in ast.walk(module.tree)
        for name in _asked_for(node)
        if name in METHODS
    ]


def _asked_for(node: ast.AST) -> list[object]:
    """The constant names in `hasattr(x, name)`, `getattr(x, name)` or `name in x.endpoints`."""
    operands: list[ast.expr] = []
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("hasattr", "getattr")):
        operands = node.args[1:2]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        operands = [node.left]
    return [operand.value for operand in operands if isinstance(operand, ast.Constant)]


def test_the_controller_asks_for_capabilities_not_for_methods() -> None:
    assert looked_up_by_name(package_modules()) == []


@pytest.mark.parametrize(
    "text",
    [
        "if hasattr(role, 'numeric_contract'): pass",
        "getattr(role, 'weight_sink')()",
        "rests = 'sleep' in handle.endpoints",
        "found = getattr(role, 'resume_differences', None)",
        "awake = 'wake' not in handle.endpoints",
    ],
)
def test_a_look_up_by_name_is_seen(text: str) -> None:
    assert looked_up_by_name([parse("spmd_rl.controller.worker", text)])
    assert not looked_up_by_name([parse("spmd_rl.train.trainer", text)])


def test_other_names_may_be_looked_up() -> None:
    text = "hasattr(value, 'shard'); timed('sleep'); role.numeric_contract()"
    assert not looked_up_by_name([parse("spmd_rl.controller.worker", text)])
