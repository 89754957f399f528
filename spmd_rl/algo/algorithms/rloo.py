"""RLOO: a sample is compared with the mean of the group's other samples.

    A = G / (G - 1) * (r - mean of the group)
    loss = GRPO's

Defaults: clip_low 0.2, clip_high 0.2, aggregation "token". A KL divergence is a term of the loss.
Source: Ahmadian et al. 2024, "Back to Basics".
"""

from __future__ import annotations

from spmd_rl.algo.advantages import rloo_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm

FACTS = AlgorithmFacts()


def rloo(cfg: PolicyConfig) -> Algorithm:
    """Return RLOO with these settings."""
    return group_algorithm(cfg, FACTS, rloo_advantage)
