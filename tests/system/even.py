"""Reward that a model of random weights gets in part.

Without a gradient, every resume would be right.
"""

from __future__ import annotations

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def even(prompt: Prompt, sample: Sample) -> float:
    """Return the fraction of even tokens."""
    return float((sample.tokens % 2 == 0).mean())
