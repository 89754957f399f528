"""GiGPO: whole episodes are compared with each other, and turns with those from the same state.

    A = A_episode + turn_weight * A_turn
    A_episode = GRPO's advantage of the episode's reward
    A_turn = (return - mean) / (std + 1e-6) over the turns of the prompt that began in one state
    loss = GRPO's

Defaults: turn_weight 1, clip_low 0.2, clip_high 0.2, aggregation "token". A KL divergence is a term
of the loss. A turn whose state no other shares has no A_turn.
Source: Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.agents import compared_by_agent
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm
from spmd_rl.algo.turns import among_equal_states, by_turn
from spmd_rl.types.groups import Group

FACTS = AlgorithmFacts(reads=("turn_weight", "discount"))


def gigpo(cfg: PolicyConfig) -> Algorithm:
    """Return GiGPO with these settings."""
    of_episodes = compared_by_agent(group_advantage)

    def advantage(groups: list[Group]) -> list[NDArray[np.float64]]:
        of_turns = by_turn(groups, among_equal_states, cfg.discount)
        return [
            np.repeat(episode, [len(sample.tokens) for sample in group.samples])
            + cfg.turn_weight * turns
            for group, episode, turns in zip(groups, of_episodes(groups), of_turns, strict=True)
        ]

    return group_algorithm(cfg, FACTS, advantage, advantage_of="tokens")
