"""Help of a recipe: `--help` lists the settings that people change first, `--help-all` all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spmd_rl.cli.help import PAGE, USAGE, WIDTH, of_recipe, shipped, short_line, shortened
from spmd_rl.config.describe import Key, describe
from spmd_rl.controller.run.recipe import load_recipe
from spmd_rl.rollout.kinds import KINDS

ROOT = Path(__file__).parents[3]
EXAMPLES = [
    str(ROOT / "examples" / name) for name in ("arithmetic/recipe.py", "own_recipe/tour.py")
]
RECIPES = [*shipped(), *EXAMPLES]


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


def listed(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("  --")]
    return [line.split("=")[0].removeprefix("  --") for line in lines]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_is_listed_and_nothing_else(recipe: str) -> None:
    names = listed(of_recipe(recipe, ["--help-all"]))
    assert sorted(names) == sorted(key.name for key in describe(load_recipe(recipe).config))
    assert not {"trainer.model", "engine.model", "engine.reward", "sampling.seed"} & set(names)


def test_all_keys_are_grouped_by_table() -> None:
    lines = of_recipe("sft", ["--help-all"]).splitlines()
    titles = [line for line in lines if line.endswith(":")]
    assert titles == ["settings of the recipe:", "run:", "trainer:", "eval:", "split:", "prompts:"]
    start = lines.index("split:")
    assert lines[start - 1] == ""
    assert lines[start + 1].startswith("  --split.train.ranks='all'  (str)  ")


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_first_setting_has_one_line_that_says_enough(recipe: str) -> None:
    usage, *lines, last = of_recipe(recipe, ["--help"]).splitlines()
    assert usage == USAGE
    settings = [line for line in lines if line.startswith("  --")]
    assert 15 <= len(settings) <= 40
    assert [line for line in [*lines, last] if len(line) > WIDTH] == []
    assert [line for line in settings if line.endswith("...") or len(line.split()) < 2] == []
    num_others = len({*listed(of_recipe(recipe, ["--help-all"]))}) - len(settings)
    assert last.startswith(f"--help-all lists the other {num_others} settings too")
    assert last.endswith(f"{PAGE}.")


def test_a_setting_that_is_long_keeps_to_its_line() -> None:
    doc = "of something that is described in one very long clause, which nothing divides at all"
    line = short_line(Key("a.name", "int", "1", doc))
    assert line.startswith("  --a.name=1  ")
    assert len(line) <= WIDTH
    assert line.endswith(" ...")
    assert len(short_line(Key("a" * 90, "str", "'value'", doc))) <= WIDTH


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("passes over the data; 0: none", "passes over the data"),
        ("a short text", "a short text"),
        ("which engine: ours or another one", "which engine"),
        ("a file (docs/data.md) of many prompts", "a file"),
        ("of none; 0: all of them, and more", "of none"),
        ("topk: the number of likely tokens", "topk: the number ..."),
    ],
)
def test_a_text_is_cut_at_its_clauses(text: str, first: str) -> None:
    assert shortened(text, 20) == first


def test_an_engine_shows_its_own_axes_alone() -> None:
    names = listed(of_recipe("grpo", ["--help-all"]))
    axes = {role: axes_of(names, role) for role in ("train", "infer", "reference", "critic")}
    assert axes["train"] == ["dp", "fsdp", "tp", "pp", "cp", "ep", "etp"]
    assert axes["infer"] == ["dp", "tp", "ep"]
    assert axes["reference"] == axes["critic"] == ["dp", "fsdp", "tp", "cp", "ep"]
    for recipe in ("collect", "rejection_sampling", "grpo_fully_async", "distill"):
        assert axes_of(listed(of_recipe(recipe, ["--help-all"])), "infer") == axes["infer"]
    assert set(axes["infer"]) | {"fsdp"} == {axis for kind in KINDS for axis in kind.axes}


def axes_of(names: list[str], role: str) -> list[str]:
    start = f"split.{role}."
    keys = [name.removeprefix(start) for name in names if name.startswith(start)]
    assert keys[0] == "ranks"
    return keys[1:]


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
    lines = of_recipe("grpo", ["--help-all"]).splitlines()
    assert "  --engine.max_batch=256  (int)  [native] sequences running at once" in lines
    folder = "Hugging Face folder; transformers:PATH is computed by transformers"
    assert f"  --model=required  (str)  {folder}" in lines
    line = "  --model=required                      Hugging Face folder"
    assert line in of_recipe("grpo").splitlines()
