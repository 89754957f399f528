"""PPO: a critic predicts the return from each token on, and advantages are what exceeds it.

    r_t = -kl.coef * (log policy - log reference), and the reward on the last token
    delta_t = r_t + discount * V_(t+1) - V_t, with V = 0 after the last token
    A_t = delta_t + discount * gae_lambda * A_(t+1), then whitened over all tokens of the batch
    loss = GRPO's
    critic: max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2, with R = A + V before whitening

The critic is a model of its own, with the settings `critic`. During the first
`critic_warmup_steps` it learns alone.

Defaults: discount 1, gae_lambda 1, clip_low 0.2, clip_high 0.2, value_clip 0.2, aggregation
"token". A KL divergence is a reward.
Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; Ouyang et al. 2022.
"""

from __future__ import annotations

from functools import partial

from spmd_rl.algo.advantages import task_rewards
from spmd_rl.algo.algorithm import VALUES, Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.credit import ppo_credit
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import loss_from, needs_of

FACTS = AlgorithmFacts(
    reads=("discount", "gae_lambda", "value_clip", "critic_warmup_steps", "critic"),
    ignores=("drop_equal_groups",),
    compares_samples=False,
    kl_place="reward",
)


def ppo(cfg: PolicyConfig) -> Algorithm:
    """Return PPO with these settings."""
    credit = partial(
        ppo_credit,
        kl_coef=FACTS.kl_reward_coef(cfg.kl),
        discount=cfg.discount,
        gae_lambda=cfg.gae_lambda,
    )
    needs = needs_of(cfg) | {VALUES}
    return Algorithm(task_rewards, loss_from(cfg, FACTS), credit=credit, needs=needs)
