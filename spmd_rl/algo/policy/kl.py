"""Estimators of the KL divergence of a policy from a reference, one value a token.

With d = log policy - log reference of a token that the policy drew:

    k1       d                    unbiased value, noisy, may be negative
    k2       d^2 / 2              its gradient is that of the reverse KL
    k3       exp(-d) - 1 + d      unbiased value, never negative
    low_var  k3, within [-10, 10]

Source: Schulman 2020, "Approximating KL divergence". The clamps of low_var are verl's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.algo.config import Estimator

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # whose exp float32 holds
MAX_LOW_VAR = 10.0


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate of each token. Raises: ValueError for an unknown estimator."""
    distance = logprobs - reference_logprobs
    if estimator == "k1":
        return distance
    if estimator == "k2":
        return distance.square() / 2
    if estimator == "k3":
        return (-distance).exp() - 1 + distance
    if estimator == "low_var":
        bounded = distance.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return ((-bounded).exp() - 1 + bounded).clamp(-MAX_LOW_VAR, MAX_LOW_VAR)
    raise ValueError(f"estimator = {estimator!r}: expected k1, k2, k3 or low_var")


def kl_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: Estimator,
    ratio: Tensor | None = None,
) -> Tensor:
    """Return the estimate as a term of a loss. With a `ratio`, the estimate is multiplied by it.

    The ratio of the policy to the behaviour carries its gradient: then the expected gradient is
    that of the KL divergence (DeepSeek-AI 2025, V3.2).
    Raises: ValueError for k1 without the ratio, whose expected gradient is 0 on policy; for k2 with
    it, whose gradient would be that of no divergence.
    """
    if estimator == "k1" and ratio is None:
        raise ValueError("k1 as a loss has an expected gradient of 0: use another estimator")
    if estimator == "k2" and ratio is not None:
        raise ValueError("the unbiased form is right for k1 and k3, not for k2")
    estimate = kl_estimate(logprobs, reference_logprobs, estimator)
    return estimate if ratio is None else ratio * estimate
