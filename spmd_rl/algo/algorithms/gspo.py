"""GSPO: the ratio is that of whole answers, the geometric mean over their tokens.

    A = (r - mean of the group) / (std of the group + 1e-6)
    s = exp(mean over the answer of log policy - log behaviour)
    loss = max(-s * A, -clip(s, 1 - clip_low, 1 + clip_high) * A)

Such a ratio hardly moves, so its bounds are narrow.

Defaults: clip_low 3e-4, clip_high 4e-4, aggregation "sample". A KL divergence is a term of the
loss.
Source: Zheng et al. 2025, "Group Sequence Policy Optimization".
"""

from __future__ import annotations

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.policy.loss_settings import group_algorithm, loss_from


def gspo(cfg: PolicyConfig) -> Algorithm:
    """Return GSPO with these settings."""
    loss = loss_from(cfg, surrogate="gspo", clip_low=3e-4, clip_high=4e-4)
    return group_algorithm(cfg, Algorithm(group_advantage, loss, "sample"))
