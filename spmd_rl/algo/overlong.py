"""DAPO's penalty on long answers, as a change of the rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spmd_rl.types.groups import Group
from spmd_rl.types.samples import NO_VERSION, Sample


def overlong_penalty(
    num_tokens: int, *, max_response_tokens: int, buffer: int, penalty: float
) -> float:
    """Return what an answer of so many drawn tokens adds to its reward: 0 or less.

    It falls from 0 to -penalty over the last `buffer` tokens before `max_response_tokens`.
    Source: Yu et al. 2025 (DAPO), equation 13.
    """
    allowed = max_response_tokens - buffer
    return penalty * min(0.0, max(-1.0, (allowed - num_tokens) / buffer))


def with_overlong_penalty(
    groups: list[Group], *, max_response_tokens: int, buffer: int, penalty: float
) -> list[Group]:
    """Return the groups with each sample's reward less its penalty; the originals stay."""

    def shaped(sample: Sample) -> Sample:
        less = overlong_penalty(
            int(np.count_nonzero(sample.versions != NO_VERSION)),
            max_response_tokens=max_response_tokens,
            buffer=buffer,
            penalty=penalty,
        )
        return sample.replace(reward=sample.reward + less)

    return [replace(group, samples=[*map(shaped, group.samples)]) for group in groups]
