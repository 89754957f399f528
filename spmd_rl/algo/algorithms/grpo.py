"""GRPO: the samples of a prompt are compared with each other.

    A = (r - mean of the group) / (std of the group + 1e-6)
    loss = max(-ratio * A, -clip(ratio, 1 - clip_low, 1 + clip_high) * A)

Defaults: clip_low 0.2, clip_high 0.2, aggregation "token". A KL divergence is a term of the loss.
Source: Shao et al. 2024, "DeepSeekMath".
"""

from __future__ import annotations

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm

FACTS = AlgorithmFacts()


def grpo(cfg: PolicyConfig) -> Algorithm:
    """Return GRPO with these settings."""
    return group_algorithm(cfg, FACTS, group_advantage)
