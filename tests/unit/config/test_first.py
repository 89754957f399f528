"""First settings of a recipe: which ones `--help` shows, and in which groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pytest

from spmd_rl.config.describe import describe
from spmd_rl.config.first import FIRST, OWN, SELDOM, first_groups
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.recipe import load_recipe, shipped_recipes
from spmd_rl.recipes import grpo

ROOT = Path(__file__).parents[3]
RECIPES = [*shipped_recipes(), *map(str, (ROOT / "examples").glob("*/recipe.py"))]
NAMES = [*chain.from_iterable(FIRST.values())]


def shown(config: type) -> dict[str, list[str]]:
    return {title: [key.name for key in keys] for title, keys in first_groups(config).items()}


@dataclass(frozen=True)
class Cap:
    largest: float = 5.0  # weight of a token


@dataclass(frozen=True)
class Mine(grpo.Config):
    bonus: float = 0.0  # for short answers
    cap: Cap = field(default_factory=Cap)


@dataclass(frozen=True)
class Chosen(Mine):
    length: int = 0  # of an answer
    first_settings: ClassVar[tuple[str, ...]] = ("cap.largest", "hooks.processes")
    seldom_settings: ClassVar[tuple[str, ...]] = ("reward", "eval")


@dataclass(frozen=True)
class Alone:
    text: str = ""  # that is read
    start_step: int = 0  # of the loop
    cap: Cap = field(default_factory=Cap)


@dataclass(frozen=True)
class Running:
    text: str = ""  # that is read
    run: RunConfig = field(default_factory=RunConfig)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_some_thirty_first_settings(recipe: str) -> None:
    config = load_recipe(recipe).config
    names = [*chain.from_iterable(shown(config).values())]
    assert 15 <= len(names) <= 40
    assert len(set(names)) == len(names)
    assert set(names) <= {key.name for key in describe(config)}
    needed = {key.name for key in describe(config) if key.default == "required"}
    assert {name for name in needed if ".NAME." not in name} <= set(names)


def test_every_name_is_a_setting_of_a_shipped_recipe() -> None:
    known = {key.name for name in shipped_recipes() for key in describe(load_recipe(name).config)}
    assert [name for name in [*NAMES, *SELDOM] if name not in known] == []
    assert len(set(NAMES)) == len(NAMES)


def test_names_that_a_recipe_declares_are_its_own() -> None:
    for name in shipped_recipes():
        config = load_recipe(name).config
        keys = {key.name for key in describe(config)}
        tables = {name.partition(".")[0] for name in keys}
        assert set(getattr(config, "first_settings", ())) <= keys
        assert set(getattr(config, "seldom_settings", ())) <= keys | tables


def test_a_recipe_shows_its_own_settings_beside_the_shared_ones() -> None:
    groups = shown(Mine)
    assert list(groups)[:2] == ["model and data", OWN]
    assert groups[OWN] == ["bonus"]
    assert {title: names for title, names in groups.items() if title != OWN} == shown(grpo.Config)


def test_a_recipe_may_choose_its_first_settings() -> None:
    groups = shown(Chosen)
    assert groups[OWN] == ["bonus", "cap.largest", "hooks.processes"]
    assert groups["reward"] == ["hooks.generate"]
    assert "evaluation" not in groups


def test_a_recipe_that_shares_no_settings_shows_those_of_its_top_level() -> None:
    assert shown(Alone) == {OWN: ["text"]}
    assert shown(Running)["run"][0] == "run.name"


def test_settings_of_a_base_that_names_none_are_not_first() -> None:
    assert "dual_clip" not in chain.from_iterable(shown(grpo.Config).values())
    assert "algorithm" in shown(grpo.Config)["learning"]
