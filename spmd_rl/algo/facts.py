"""AlgorithmFacts: what is true of an algorithm whatever its settings are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spmd_rl.algo.config import KlConfig, PolicyConfig

KlPlace = Literal["loss", "reward"]


@dataclass(frozen=True)
class AlgorithmFacts:
    """Facts of one algorithm, which stand in its own file.

    reads: the settings that it reads and most others do not.
    ignores: the settings that most others read and it does not.
    compares_samples: whether it compares the samples of a prompt, so that there must be several.
    kl_place: where a KL divergence enters, unless `kl.place` says otherwise.
    check: raises a ConfigError for values that do not fit it.
    """

    reads: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    compares_samples: bool = True
    kl_place: KlPlace = "loss"
    check: Callable[[PolicyConfig], None] | None = None

    def place_of(self, kl: KlConfig) -> KlPlace:
        """Return where the KL divergence enters."""
        return self.kl_place if kl.place == "auto" else kl.place

    def kl_loss_coef(self, kl: KlConfig) -> float:
        """Return the weight of the KL divergence in the loss."""
        return kl.coef if self.place_of(kl) == "loss" else 0.0

    def kl_reward_coef(self, kl: KlConfig) -> float:
        """Return the weight of the KL divergence in the reward."""
        return kl.coef if self.place_of(kl) == "reward" else 0.0
