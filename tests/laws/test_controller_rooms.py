"""`controller/channel` moves bytes and decides nothing.

So it imports nothing else of the controller.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.laws.source import Module, imports, package_modules, parse

CHANNEL, CONTROLLER = "spmd_rl.controller.channel.", "spmd_rl.controller."


def out_of_the_channel(modules: Iterable[Module]) -> list[str]:
    """Return the imports of files in `channel/` from other rooms of the controller."""
    return [
        f"{module.name}:{item.line} imports {item.target}"
        for module in modules
        if module.name.startswith(CHANNEL)
        for item in imports(module)
        if item.target.startswith(CONTROLLER) and not item.target.startswith(CHANNEL)
    ]


def test_the_channel_imports_nothing_else_of_the_controller() -> None:
    assert out_of_the_channel(package_modules()) == []


@pytest.mark.parametrize(
    ("name", "seen"),
    [("spmd_rl.controller.channel.dealer", True), ("spmd_rl.controller.worker", False)],
)
def test_an_import_out_of_the_channel_is_seen(name: str, seen: bool) -> None:
    text = "def f():\n    from spmd_rl.controller.lifecycle.shutdown import end_process"
    assert bool(out_of_the_channel([parse(name, text)])) == seen
