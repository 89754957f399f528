"""Settings of the Rollout role, from a recipe's config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spmd_rl.config.dump import as_data
from spmd_rl.environments.config import hooks_with_agent
from spmd_rl.evaluation.config import eval_rewards
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.recipes.configs import EngineRecipe


def rollout_settings(cfg: EngineRecipe) -> dict[str, Any]:
    """Return what `spawn` passes to a `Rollout`: the model, the seed, the rewards, the hooks, the
    trainer's adapters, and whether routes are recorded.

    The rewards of `eval` are among the hooks, if the config has evaluations. Hooks may read the
    whole config. Where `agent` has a kind, its program makes the samples.
    """
    needs = RunNeeds.of(cfg)
    hooks = hooks_with_agent(cfg.hooks, needs.agent)
    if needs.eval is not None:
        extra = dict.fromkeys([*hooks.extra_rewards, *eval_rewards(needs.eval)])
        hooks = replace(hooks, extra_rewards=tuple(extra))
    return {
        "model": cfg.model,
        "seed": cfg.run.seed,
        "reward": cfg.reward,
        "hooks": hooks,
        "settings": as_data(cfg),
        "lora": needs.trainer.adapted_base if needs.trainer else None,
        "records_routes": cfg.sampling.replay_routes,
    }
