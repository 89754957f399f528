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
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import group_algorithm, loss_from
from spmd_rl.config.rules import require

MAX_CLIP = 0.1  # of the ratio of whole answers


def _check_clips(cfg: PolicyConfig) -> None:
    """Raise a ConfigError for a clip of the ratio of a token."""
    for name in ("clip_low", "clip_high"):
        value = getattr(cfg, name)
        expected = "less than 0.1, as the ratio is that of whole answers (3e-4 and 4e-4)"
        require(value is None or value < MAX_CLIP, name, value, expected)


FACTS = AlgorithmFacts(ignores=("dual_clip",), check=_check_clips)


def gspo(cfg: PolicyConfig) -> Algorithm:
    """Return GSPO with these settings."""
    loss = loss_from(cfg, FACTS, surrogate="gspo", clip_low=3e-4, clip_high=4e-4)
    return group_algorithm(cfg, FACTS, group_advantage, loss, aggregation="sample")
