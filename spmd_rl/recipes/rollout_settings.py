"""Settings of the Rollout role, from a recipe's config."""

from __future__ import annotations

from typing import Any

from spmd_rl.config.dump import as_data


def rollout_settings(cfg: Any) -> dict[str, Any]:
    """Return what `spawn` passes to a `Rollout`: the model, the seed, the rewards and the hooks.

    Hooks may read the whole config. `cfg` is a recipe's config with `model`, `run`, `reward` and
    `hooks`.
    """
    return {
        "model": cfg.model,
        "seed": cfg.run.seed,
        "reward": cfg.reward,
        "hooks": cfg.hooks,
        "settings": as_data(cfg),
    }
