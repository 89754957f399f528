"""Prompts of a recipe, from its config."""

from __future__ import annotations

from typing import Any

from spmd_rl.data.prompts import Prompts
from spmd_rl.hooks.controller_hooks import pick_of
from spmd_rl.model.tokenizer import load_tokenizer


def load_prompts(cfg: Any) -> Prompts:
    """Return the prompts of `cfg.data`, tokenised for `cfg.model`.

    `cfg` is a recipe's config with `model`, `data`, `prompts`, `sampling` and `prompts_per_step`.
    With `hooks.pick_sources`, that function weights the sources of a mixture at each step.
    Raises: DataError or ConfigError, as `Prompts` does.
    """
    pick = cfg.hooks.pick_sources if hasattr(cfg, "hooks") else ""
    return Prompts(
        cfg.data,
        cfg.prompts,
        load_tokenizer(cfg.model),
        cfg.sampling,
        pick=pick_of(pick) if pick else None,
        per_step=cfg.prompts_per_step,
    )
