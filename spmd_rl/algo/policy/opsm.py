"""Off-policy sequence masking (OPSM): samples that got worse and that the policy has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.algo.losses import LossInput
from spmd_rl.algo.policy.sequence_sums import over_sequences

if TYPE_CHECKING:
    from torch import Tensor


def opsm_masked(out: LossInput, behaviour_logprobs: Tensor, *, delta: float) -> Tensor:
    """Return whether a token has A < 0, and its sequence a mean of behaviour - policy above delta.

    Such tokens leave the policy's loss. Shape: [M].
    Source: DeepSeek-AI 2025 (V3.2), off-policy sequence masking.
    """
    fall = behaviour_logprobs - out.logprobs
    mean = over_sequences(fall, out.sequence, out.num_sequences, "mean")
    return (out.advantages < 0) & (mean > delta)
