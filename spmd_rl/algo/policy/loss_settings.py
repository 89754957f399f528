"""Settings of a policy update as keywords of `policy_loss`, and what its terms need."""

from __future__ import annotations

from functools import partial
from typing import Any

from spmd_rl.algo.algorithm import ENTROPY, REFERENCE_LOGPROBS, Advantage, Algorithm
from spmd_rl.algo.config import CorrectionConfig, KlConfig, PolicyConfig
from spmd_rl.algo.credit import kl_as_reward
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.losses import Loss
from spmd_rl.algo.policy.policy_loss import Surrogate, policy_loss


def loss_from(
    cfg: PolicyConfig,
    facts: AlgorithmFacts,
    *,
    surrogate: Surrogate = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> partial[Any]:
    """Return `policy_loss` with the settings of `cfg`, and the algorithm's own where it has none.

    Only what is on becomes a keyword.
    """
    keywords: dict[str, Any] = {
        "clip_low": clip_low if cfg.clip_low is None else cfg.clip_low,
        "clip_high": clip_high if cfg.clip_high is None else cfg.clip_high,
    }
    if surrogate != "ppo":
        keywords["surrogate"] = surrogate
    if cfg.behaviour != "old":
        keywords["behaviour"] = cfg.behaviour
    for name in ("dual_clip", "entropy_coef", "opsm_delta"):
        if value := getattr(cfg, name):
            keywords[name] = value
    keywords |= _kl_keywords(cfg.kl, facts) | _correction_keywords(cfg.correction)
    return partial(policy_loss, **keywords)


def _kl_keywords(kl: KlConfig, facts: AlgorithmFacts) -> dict[str, Any]:
    if not facts.kl_loss_coef(kl):
        return {}
    estimator = "low_var" if kl.estimator == "auto" else kl.estimator
    return {"kl_coef": kl.coef, "kl_estimator": estimator, "kl_unbiased": kl.unbiased}


def _correction_keywords(cfg: CorrectionConfig) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    if cfg.mode != "none":
        keywords |= {
            "correction": cfg.mode,
            "correction_level": cfg.level,
            "correction_high": cfg.high,
            "correction_low": cfg.low,
        }
    if cfg.reject != "none":
        keywords |= {
            "reject": cfg.reject,
            "reject_high": cfg.reject_high,
            "reject_low": cfg.reject_low,
        }
    return keywords | ({"veto": cfg.veto} if cfg.veto else {})


def needs_of(cfg: PolicyConfig) -> frozenset[str]:
    """Return what the KL and entropy terms need."""
    needs = {ENTROPY} if cfg.entropy_coef else set()
    return frozenset(needs | ({REFERENCE_LOGPROBS} if cfg.kl.coef else set()))


def group_algorithm(
    cfg: PolicyConfig,
    facts: AlgorithmFacts,
    advantage: Advantage,
    loss: Loss | None = None,
    **parts: Any,
) -> Algorithm:
    """Return an algorithm that compares the samples of a group, with the needs of `cfg`.

    Its loss is GRPO's unless `loss` is given, and `parts` are further parts of the `Algorithm`. A
    KL divergence that is a reward is subtracted from the advantages of tokens.
    """
    credit = partial(kl_as_reward, kl_coef=cfg.kl.coef) if facts.kl_reward_coef(cfg.kl) else None
    loss = loss or loss_from(cfg, facts)
    return Algorithm(advantage, loss, credit=credit, needs=needs_of(cfg), **parts)
