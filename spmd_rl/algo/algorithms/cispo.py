"""CISPO: the clipped ratio is a constant weight, so that every token keeps its gradient.

    A = (r - mean of the group) / (std of the group + 1e-6)
    loss = -constant(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log policy

Defaults: clip_low 1.0, which is no lower bound; clip_high 4.0, a largest weight of 5; aggregation
"token". A KL divergence is a term of the loss.
Source: MiniMax 2025, "MiniMax-M1"; the largest weight is that of Khatri et al. 2025, "ScaleRL".
"""

from __future__ import annotations

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm, loss_from

FACTS = AlgorithmFacts(ignores=("dual_clip",))


def cispo(cfg: PolicyConfig) -> Algorithm:
    """Return CISPO with these settings."""
    loss = loss_from(cfg, FACTS, surrogate="cispo", clip_low=1.0, clip_high=4.0)
    return group_algorithm(cfg, FACTS, group_advantage, loss)
