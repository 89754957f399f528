"""docs/settings.md is what its generator makes of the recipes, and it names all their settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import pytest

from docs.build_settings import PAGE, SettingsPage, listed_recipes, page
from spmd_rl.config.describe import Key, describe
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.recipe import load_recipe, shipped_recipes

TEXT = PAGE.read_text(encoding="utf-8")
_SETTING = re.compile(r"^\| (?:\*\*)?`([\w.]+)`", re.MULTILINE)


@dataclass(frozen=True)
class Planted:
    run: RunConfig = field(default_factory=lambda: RunConfig(save_every=7))
    planted: int = 3  # a setting that a recipe has got


def unnamed(text: str, recipe: str) -> list[str]:
    """Return the settings of a recipe that the page does not name; a critic's are a trainer's."""
    named = set(_SETTING.findall(text))
    names = [key.name for key in describe(load_recipe(recipe).config)]
    return [name for name in names if re.sub(r"^critic\.", "trainer.", name) not in named]


def test_the_page_is_what_the_configs_say() -> None:
    assert page() == TEXT, "run `make settings`"


def test_another_config_makes_another_page() -> None:
    recipes = listed_recipes()
    keys = tuple(describe(Planted))
    recipes["sft"] = replace(recipes["sft"], keys=keys, first=frozenset({"planted"}))
    text = SettingsPage(recipes).text()
    assert text != TEXT
    assert "| **`planted`** | `3` | a setting that a recipe has got |" in text
    assert "Some defaults differ: `run.save_every` is `7`." in text


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_setting_is_on_the_page(recipe: str) -> None:
    assert unnamed(TEXT, recipe) == []
    assert f"### `{recipe}`" in TEXT


def test_a_setting_that_is_missing_is_seen() -> None:
    without = TEXT.replace("| **`beta`**", "| beta")
    assert unnamed(without, "dpo") == ["beta"]


def test_what_recipes_share_is_listed_once() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and "`" in line]
    assert len(rows) == len(set(rows))
    assert sum("`trainer.lr`" in row for row in rows) == 1
    key = Key(
        "engine.kind", "one of 'native', 'sglang', 'plain'", "'native'", "which engine generates"
    )
    assert f"| **`engine.kind`** | `'native'` | {key.doc} (`native`, `sglang`, `plain`) |" in rows
