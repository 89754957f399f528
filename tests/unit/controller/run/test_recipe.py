"""Recipes: how the words of a command line name and configure one."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.controller.run.recipe import Invocation, load_recipe, run_config
from spmd_rl.errors import ConfigError

RECIPE = """
from dataclasses import dataclass, field
from spmd_rl.config.run import RunConfig

@dataclass(frozen=True)
class Config:
    steps: int = 3
    run: RunConfig = field(default_factory=RunConfig)

def main(ctl, cfg): ...
"""


def test_words_become_an_invocation() -> None:
    words = [
        "grpo",
        "--model",
        "m",
        "--config",
        "a.toml",
        "--run.seed=3",
        "--nproc",
        "2",
        "--fast",
        "--data=x y",
    ]
    words += ["--max-restarts", "3"]
    assert Invocation.parse(words) == Invocation(
        "grpo", Path("a.toml"), 2, 3, False, ["model=m", "run.seed=3", "fast=true", "data=x y"]
    )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["grpo", "stray"],
        ["grpo", "--nproc", "two"],
        ["grpo", "--nproc"],
        ["grpo", "--nproc=-1"],
        ["grpo", "--nproc=0"],
    ],
)
def test_unreadable_words_are_config_errors(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        Invocation.parse(words)


def test_words_without_a_recipe_are_told_so() -> None:
    with pytest.raises(
        ConfigError, match="spmd-rl run: the following arguments are required: recipe"
    ):
        Invocation.parse(["--steps=3"])


def test_a_recipe_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "recipe_of_this_test.py").write_text(RECIPE)
    path = str(tmp_path / "recipe_of_this_test.py")
    recipe = load_recipe(path)
    cfg = recipe.configure(Invocation.parse([path, "--steps=5", "--run.seed=7"]))
    assert (cfg.steps, run_config(cfg).seed) == (5, 7)
    assert recipe.check is None


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("bare_recipe_of_this_test.py", "x = 1", "needs a dataclass Config and a function main"),
        ("json.py", RECIPE, "has the name of another module"),
        ("leaving_recipe_of_this_test.py", "raise SystemExit(0)", "importing it ends the process"),
    ],
)
def test_what_is_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, sentence: str
) -> None:
    import json  # noqa: F401  so that it is the one found

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_recipe(str(tmp_path / name))


def test_a_slip_in_a_recipe_is_told_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "slipped_recipe_of_this_test.py"
    path.write_text(f"{RECIPE}\ndef broken(:\n")
    with pytest.raises(
        ConfigError, match=rf"^{path}:{RECIPE.count(chr(10)) + 2}: SyntaxError: .*: def broken\(:$"
    ):
        load_recipe(str(path))


def test_a_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe 'gpro': did you mean grpo\? "):
        load_recipe("gpro")
    with pytest.raises(ConfigError, match="there is no recipe '..'"):
        load_recipe("..")
    with pytest.raises(ConfigError, match="there is no recipe at nowhere.py"):
        load_recipe("nowhere.py")


def test_only_recipes_are_named_as_shipped() -> None:
    shipped = (
        "collect, distill, dpo, evaluate, grpo, grpo_async, grpo_fully_async, pretrain, "
        "rejection_sampling, replay, reward_model, rlhf, sft"
    )
    with pytest.raises(
        ConfigError, match=rf"shipped ones are {shipped} \(a path must end in .py\)"
    ):
        load_recipe("nope")
