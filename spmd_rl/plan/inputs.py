"""What a command line asks for, refused in the process that reads it: no rank is started, and no torch imported."""

from __future__ import annotations

from typing import Any

from spmd_rl.controller.recipe import Invocation, load_recipe
from spmd_rl.data.files import read_records
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.model.spec import weight_files


def accept(invocation: Invocation) -> Any:
    """The recipe's config. Raises: what is wrong with it in the eyes of the recipe, or with the input it names."""
    recipe = load_recipe(invocation.recipe)
    cfg = recipe.configure(invocation)
    if recipe.check is not None:
        recipe.check(cfg)
    check_input(cfg)
    return cfg


def check_input(cfg: Any) -> None:
    """Look for the first weights, and for the keys of prompts, where the recipe's `given` says what they are read from.

    Raises: ConfigError or DataError with the one thing to mend.
    """
    given: dict[str, str] = getattr(type(cfg), "given", {})
    if "trainer.model" in given and getattr(getattr(cfg, "trainer", None), "init", "") == "folder":
        weight_files(getattr(cfg, given["trainer.model"]))
    prompts = getattr(cfg, "prompts", None)
    if "prompts.path" in given and isinstance(prompts, PromptConfig):
        for record in read_records(getattr(cfg, given["prompts.path"])):
            record.value(prompts.prompt_key)
            if prompts.answer_key:
                record.text(prompts.answer_key)
