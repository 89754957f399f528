"""Prompts of a recipe, from its config."""

from __future__ import annotations

from spmd_rl.data.prompts import Prompts
from spmd_rl.hooks.controller_hooks import pick_of
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.recipes.protocols import DataRecipe


def load_prompts(cfg: DataRecipe) -> Prompts:
    """Return the prompts of `cfg.data`, tokenised for `cfg.model`.

    With `hooks.pick_sources`, that function weights the sources of a mixture at each step.
    Raises: DataError or ConfigError, as `Prompts` does.
    """
    pick = cfg.hooks.pick_sources
    return Prompts(
        cfg.data,
        cfg.prompts,
        load_tokenizer(cfg.model),
        cfg.sampling,
        pick=pick_of(pick) if pick else None,
        per_step=cfg.prompts_per_step,
    )
