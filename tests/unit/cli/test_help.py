"""Help of a recipe: `spmd-rl run RECIPE --help` lists every key that it takes, with a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spmd_rl.cli.help import of_recipe, shipped
from spmd_rl.config.describe import describe
from spmd_rl.controller.run.recipe import load_recipe

EXAMPLE = str(Path(__file__).parents[3] / "examples/arithmetic/recipe.py")
RECIPES = [*shipped(), EXAMPLE]


@dataclass(frozen=True)
class Part:
    model: str = ""
    rate: float = 0.0
    size: int = 0  # in bytes


@dataclass(frozen=True)
class Bare:
    model: str  # a folder
    seed: int = 1  # of all
    part: Part = field(default_factory=Part)


def untold(config: type) -> list[str]:
    return [key.name for key in describe(config) if not key.doc]


def test_recipes_that_are_shipped() -> None:
    assert list(shipped()) == [
        "collect",
        "distill",
        "dpo",
        "evaluate",
        "grpo",
        "grpo_async",
        "grpo_fully_async",
        "pretrain",
        "rejection_sampling",
        "replay",
        "reward_model",
        "rlhf",
        "sft",
    ]
    assert all(0 < len(line) < 105 for line in shipped().values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_has_a_text(recipe: str) -> None:
    assert untold(load_recipe(recipe).config) == []


def test_a_key_without_a_text_is_seen() -> None:
    assert untold(Bare) == ["part.model", "part.rate"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_is_listed_and_nothing_else(recipe: str) -> None:
    lines = of_recipe(recipe).splitlines()[1:]
    listed = [line.split("=")[0].removeprefix("  --") for line in lines]
    assert listed == [key.name for key in describe(load_recipe(recipe).config)]
    assert not {"trainer.model", "engine.model", "engine.reward", "sampling.seed"} & set(listed)


@dataclass(frozen=True)
class Reading:
    """A config whose check reads the file that a key names."""

    model: str
    steps: int = 3

    def __post_init__(self) -> None:
        Path(self.model, "config.json").read_text()


def test_a_recipe_that_looks_at_its_values_is_listed_whole() -> None:
    assert [key.name for key in describe(Reading)] == ["model", "steps"]


def test_a_line_of_help() -> None:
    assert (
        "  --engine.max_batch=256  (int)  [native] sequences running at once"
        in of_recipe("grpo").splitlines()
    )
    assert "  --model=required  (str)  Hugging Face folder" in of_recipe("grpo").splitlines()
