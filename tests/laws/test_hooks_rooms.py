"""`hooks/rank` and `hooks/child` are two processes, which share `hooks/wire` alone.

What lies in `hooks` itself is below all three. What users call is the one exception: `rl` gets it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.laws.source import Module, imports, package_modules, parse

HOOKS = "spmd_rl.hooks."
BELOW = {"rank": {"wire", ""}, "child": {"wire", ""}, "wire": {""}, "": set[str]()}


def room_of(name: str) -> str:
    """Return the room of a module of hooks; "" for those that lie in `hooks` itself."""
    first = name.removeprefix(HOOKS).split(".")[0]
    return first if first in BELOW else ""


def wrong_ways(modules: Iterable[Module]) -> list[str]:
    """Return the imports of files of hooks from a room of hooks that is not below theirs."""
    return [
        f"{module.name}:{item.line} imports {item.target}"
        for module in modules
        if module.name.startswith(HOOKS)
        for item in imports(module)
        if item.target.startswith(HOOKS)
        and room_of(item.target) not in BELOW[room_of(module.name)] | {room_of(module.name)}
    ]


def test_rank_and_child_share_the_wire_alone() -> None:
    assert wrong_ways(package_modules()) == []


@pytest.mark.parametrize(
    ("name", "target", "seen"),
    [
        ("rank.pool", "wire.messages", False),
        ("rank.pool", "results", False),
        ("rank.pool", "child.server", True),
        ("child.server", "rank.tasks", True),
        ("wire.messages", "child.calls", True),
        ("results", "wire.messages", True),
    ],
)
def test_a_wrong_way_is_seen(name: str, target: str, seen: bool) -> None:
    text = f"def f():\n    from {HOOKS}{target} import x"
    assert bool(wrong_ways([parse(HOOKS + name, text)])) == seen
