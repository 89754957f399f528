"""What engines that share a model do not have. No torch."""

from __future__ import annotations

from spmd_rl.errors import ConfigError


def check_shared(weights: str, at: str, has_adapters: bool) -> None:
    """Raise a ConfigError that begins with `at` for what does not go with sums in several parts, in
    an engine that has its weights in the format `weights`.
    """
    if weights != "full":
        raise ConfigError(
            f"{at} does not go with engine.weights = '{weights}': ranks share weights in 16 or "
            "32 bits alone, so set it to 'full'"
        )
    if has_adapters:
        raise ConfigError(
            f"{at} does not go with adapters that are pushed alone: set "
            "trainer.lora.merged_push = true, so that a push brings whole weights"
        )
