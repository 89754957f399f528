"""A router of sigmoids, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

CORRECTION = "e_score_correction_bias"  # a fixed parameter of the router


@dataclass(frozen=True)
class SigmoidRouter:
    """A choice by sigmoids: of `num_groups` groups of experts, those in the best few.

    A correction of each expert counts in the choice alone. `scale` multiplies the weights.
    """

    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
