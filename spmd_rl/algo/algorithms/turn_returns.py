"""Turn returns: a turn is compared with all turns of its prompt, by what came of it.

    A = return - mean return of all turns of the prompt's episodes
    return = reward of the turn + discount * return of the next turn
    loss = GRPO's

Defaults: discount 1, clip_low 0.2, clip_high 0.2, aggregation "token". A KL divergence is a term of
the loss. There is one baseline for all turns of a prompt. One for each place in the episode would
favour longer episodes, as fewer of them have a late turn.
"""

from __future__ import annotations

from functools import partial

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm
from spmd_rl.algo.turns import by_turn, less_mean_return

FACTS = AlgorithmFacts(reads=("discount",))


def turn_returns(cfg: PolicyConfig) -> Algorithm:
    """Return the algorithm with these settings."""
    advantage = partial(by_turn, advantage=less_mean_return, discount=cfg.discount)
    return group_algorithm(cfg, FACTS, advantage, advantage_of="tokens")
