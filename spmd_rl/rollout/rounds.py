"""Limits of a round: how many tokens a request may draw now, and whether it goes on later."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.types.samples import Sample


@lru_cache(maxsize=1024)
def sampling_of_round(sampling: SamplingConfig, num_past: int, num_new: int) -> SamplingConfig:
    """Return the sampling with which a request draws at most `num_new` tokens after its past."""
    max_tokens = min(sampling.max_tokens, num_past + num_new)
    return replace(sampling, max_tokens=max_tokens)


def ends_with_round(sample: Sample, max_tokens: int) -> bool:
    """Whether a sample ended because of its round, and not because it has all `max_tokens`."""
    return sample.status == "truncated" and len(sample.tokens) < max_tokens
