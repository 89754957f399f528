"""Dr.GRPO: GRPO without its two biases, towards easy prompts and towards short answers.

    A = r - mean of the group
    loss = GRPO's; the sum over tokens is divided by samples * sampling.max_tokens

Defaults: clip_low 0.2, clip_high 0.2, aggregation "const". A KL divergence is a term of the loss.
Source: Liu et al. 2025, "Understanding R1-Zero-Like Training".
"""

from __future__ import annotations

from functools import partial

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm

FACTS = AlgorithmFacts()


def dr_grpo(cfg: PolicyConfig) -> Algorithm:
    """Return Dr.GRPO with these settings."""
    advantage = partial(group_advantage, use_std=False)
    return group_algorithm(cfg, FACTS, advantage, aggregation="const")
