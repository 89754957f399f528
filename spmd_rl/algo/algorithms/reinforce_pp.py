"""REINFORCE++: returns of tokens, whitened over the whole batch, without a critic.

    r_t = -kl.coef * (log policy - log reference), and the reward on the last token
    G_t = r_t + discount * G_(t+1)
    A_t = (G_t - mean) / sqrt(variance + 1e-8), over all tokens of the batch
    loss = GRPO's

Groups play no part: one sample for each prompt is enough.

Defaults: discount 1, clip_low 0.2, clip_high 0.2, aggregation "token". A KL divergence is a reward.
Source: Hu et al. 2025, "REINFORCE++".
"""

from __future__ import annotations

from functools import partial

from spmd_rl.algo.advantages import task_rewards
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.credit import reinforce_pp_credit
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import loss_from, needs_of

FACTS = AlgorithmFacts(
    reads=("discount",),
    ignores=("drop_equal_groups",),
    compares_samples=False,
    kl_place="reward",
)


def reinforce_pp(cfg: PolicyConfig) -> Algorithm:
    """Return REINFORCE++ with these settings."""
    credit = partial(
        reinforce_pp_credit, kl_coef=FACTS.kl_reward_coef(cfg.kl), discount=cfg.discount
    )
    return Algorithm(task_rewards, loss_from(cfg, FACTS), credit=credit, needs=needs_of(cfg))
