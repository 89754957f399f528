"""Check of evaluation sets in the launching process, before a worker starts."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.check.inputs import check_inputs
from spmd_rl.errors import ConfigError
from spmd_rl.evaluation.config import EvalConfig, EvaluatedRecipe, eval_rewards, resolve_sets
from spmd_rl.hooks.signatures import check_hooks, reward_weights
from spmd_rl.rollout.grader_choice import all_rewards


def check_evaluation(cfg: EvaluatedRecipe) -> None:
    """Check every set of `eval`: its settings, every record of its data, and its rewards.

    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    sets = resolve_sets(cfg.eval, cfg.sampling, cfg.prompts)
    check_hooks(cfg.hooks)
    loaded = all_rewards(
        reward_weights(cfg.reward), [*cfg.hooks.extra_rewards, *eval_rewards(cfg.eval)]
    )
    for one in sets:
        check_inputs(
            model=cfg.model,
            data=one.data,
            reward=one.reward or cfg.reward,
            hooks=replace(cfg.hooks, extra_rewards=tuple(loaded), pick_sources=""),
            graders=cfg.graders,
            prompts=one.prompts,
            sampling=one.sampling,
        )


def refuse_eval_rewards(cfg: EvalConfig, instead: str) -> None:
    """Raise a ConfigError if a set names a reward, in a recipe where `instead` grades samples."""
    if cfg.reward or any(one.reward for one in cfg.named_sets().values()):
        raise ConfigError(f"eval.reward must be empty: rewards come from {instead}")
