"""Policy surrogates: the loss of a token from a ratio and an advantage, and whether it was clipped.

The ratio is that of the probability now to the probability under the behaviour policy.

Shape: every tensor is [M].
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from spmd_rl.algo.policy.sequence_sums import over_sequences

if TYPE_CHECKING:
    from torch import Tensor


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio). Where it overflows, it is infinite and without a gradient.

    So a token whose clipped loss is finite has a finite gradient: 0 times infinity is no number.
    """
    ratio = log_ratio.exp()
    overflows = ratio.isinf()
    return log_ratio.masked_fill(overflows, 0.0).exp().masked_fill(overflows, inf)


def ppo_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss: max(-ratio * A, -clip(ratio, 1 - low, 1 + high) * A).

    `dual_clip` bounds the loss where A is negative: min(loss, -dual_clip * A).
    Source: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip); Yu et al. 2025 (DAPO).
    """
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = unclipped.maximum(clipped)
    is_clipped = clipped > unclipped
    if dual_clip is not None:
        bound = -dual_clip * advantages
        exceeds = (advantages < 0) & (loss > bound)
        loss = bound.where(exceeds, loss)
        is_clipped = is_clipped | exceeds
    return loss, is_clipped


def gspo_ratio(
    logprobs: Tensor, behaviour_logprobs: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """Return the geometric mean of the ratios of a sequence, for each of its tokens.

    Its gradient is that of GSPO-token, which is GSPO's where a sequence has one advantage.
    Source: Zheng et al. 2025 (GSPO), equation 13.
    """
    log_ratio = (logprobs - behaviour_logprobs).detach()
    mean = over_sequences(log_ratio, sequence, num_sequences, "mean")
    return ratio_of(logprobs - logprobs.detach() + mean)


def cispo_surrogate(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return CISPO's loss: -clip(ratio, 1 - low, 1 + high) * A * logprob, the ratio detached.

    A clipped token keeps its gradient.
    Source: MiniMax 2025 (M1).
    """
    constant = ratio.detach()
    weight = constant.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != constant
