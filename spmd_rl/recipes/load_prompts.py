"""Prompts of a recipe, from its config, and their check before a run."""

from __future__ import annotations

from spmd_rl.check.inputs import check_inputs
from spmd_rl.data.prompts import Prompts
from spmd_rl.hooks.controller_hooks import pick_of
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.recipes.configs import DataRecipe
from spmd_rl.train.config import TrainerConfig


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


def check_data_recipe(
    cfg: DataRecipe,
    trainer: TrainerConfig = TrainerConfig(),  # noqa: B008  it is frozen
    *,
    teacher: str = "",
    reward_model: str = "",
) -> None:
    """Check the model, the data, and all that samples and grades, as `check_inputs` does.

    The model's folder must have what `trainer` starts from: its weights, where none is given.
    """
    check_inputs(
        model=cfg.model,
        data=cfg.data,
        reward=cfg.reward,
        hooks=cfg.hooks,
        graders=cfg.graders,
        prompts=cfg.prompts,
        trainer=trainer,
        sampling=cfg.sampling,
        teacher=teacher,
        reward_model=reward_model,
    )
