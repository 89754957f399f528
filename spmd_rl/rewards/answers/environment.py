"""Reward function of samples that an environment has graded already."""

from __future__ import annotations

import math

from spmd_rl.errors import DataError
from spmd_rl.types.prompts import Prompt, prompt_name
from spmd_rl.types.samples import GIVEN, Sample


def environment(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return the reward that the sample's environment or agent gave it, with its parts.

    Raises: DataError for a sample that has none.
    """
    if given := sample.metadata.get(GIVEN):
        return dict(given)
    if not math.isfinite(sample.reward):
        raise DataError(
            f"{prompt_name(prompt.uid)} sample {sample.index}",
            "nothing gave it a reward: reward = 'environment' needs an agent.kind that does",
        )
    return {**sample.parts, "reward": sample.reward}
