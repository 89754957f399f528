"""What engines that share a model do not have. No torch."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.rollout.native.config import NativeEngineConfig


def check_shared(cfg: NativeEngineConfig, num_parts: int, has_adapters: bool) -> None:
    """Raise a ConfigError for what does not go with `num_parts` ranks that share a model, of this
    engine or another one of the run.
    """
    if num_parts == 1:
        return
    at = f"split.infer.tp = {num_parts}"
    if cfg.weights != "full":
        raise ConfigError(
            f"{at} does not go with engine.weights = '{cfg.weights}': ranks share weights in 16 or "
            "32 bits alone, so set it to 'full'"
        )
    if has_adapters:
        raise ConfigError(
            f"{at} does not go with adapters that are pushed alone: set "
            "trainer.lora.merged_push = true, so that a push brings whole weights"
        )
