"""No two classes of the package share a name, so that a name says which class is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.laws.source import Module, package_modules, parse

RECIPES = "spmd_rl.recipes."  # each has a class `Config`, which the command line looks up
MIN_CLASSES = 500  # how many there are at least, so that the law looks at something


def classes(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """Yield the name and the place of every class, but for the recipes' `Config`."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                if node.name == "Config" and module.name.startswith(RECIPES):
                    continue
                yield node.name, f"{module.name}:{node.lineno}"


def shared_names(modules: Iterable[Module]) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in classes(modules):
        places[name].append(place)
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def test_no_two_classes_share_a_name() -> None:
    assert shared_names(package_modules()) == []


def test_there_are_classes_to_compare() -> None:
    assert len([*classes(package_modules())]) > MIN_CLASSES


def test_a_shared_name_is_seen() -> None:
    one = parse("spmd_rl.data.logs", "class Calls:\n    pass\n")
    other = parse("spmd_rl.hooks.wire.messages", "def f() -> None:\n    class Calls: ...\n")
    third = parse("spmd_rl.hooks.rank.tasks", "class Call:\n    class Part: ...\n")
    assert shared_names([one, third]) == []
    assert shared_names([one, other, third]) == [
        "Calls: spmd_rl.data.logs:1, spmd_rl.hooks.wire.messages:2"
    ]


def test_the_configs_of_recipes_alone_may_share_theirs() -> None:
    text = "class Config:\n    pass\n"
    recipes = [parse(f"spmd_rl.recipes.{name}", text) for name in ("grpo", "sft")]
    assert shared_names(recipes) == []
    elsewhere = [parse("spmd_rl.data.files.files", text), parse("spmd_rl.algo.policy.kl", text)]
    (found,) = shared_names([*recipes, *elsewhere])
    assert found == "Config: spmd_rl.data.files.files:1, spmd_rl.algo.policy.kl:1"
