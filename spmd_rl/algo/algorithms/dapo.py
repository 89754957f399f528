"""DAPO: GRPO with a higher upper clip, and without groups that teach nothing.

    A = (r - mean of the group) / (std of the group + 1e-6)
    loss = max(-ratio * A, -clip(ratio, 1 - clip_low, 1 + clip_high) * A)

Groups whose rewards are all equal are left out; a recipe with a sampler replaces them. `overlong`
shapes the reward of long answers after that choice. `mask_truncated` leaves cut answers out of the
loss.

Defaults: clip_low 0.2, clip_high 0.28, aggregation "token", drop_equal_groups true.
Source: Yu et al. 2025, "DAPO".
"""

from __future__ import annotations

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.algorithm import Algorithm, rewards_differ
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm, loss_from

FACTS = AlgorithmFacts()


def dapo(cfg: PolicyConfig) -> Algorithm:
    """Return DAPO with these settings."""
    loss = loss_from(cfg, FACTS, clip_high=0.28)
    return group_algorithm(cfg, FACTS, group_advantage, loss, keeps=rewards_differ)
