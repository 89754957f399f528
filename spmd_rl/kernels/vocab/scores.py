"""Scores of tokens under the model: log-probabilities and entropy, and their gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """Log-probabilities of chosen tokens and the entropy of each row, at its temperature.

    It is a tuple, because FSDP does not find tensors in other objects.
    Shape: logprobs, entropy [M] fp32; candidate_logprobs [M, K] fp32, or None without candidates.
    """

    logprobs: Tensor
    entropy: Tensor
    candidate_logprobs: Tensor | None


class ScoreGradients(NamedTuple):
    """Gradients of the loss towards the fields of `Scores`, or None for those that it ignores.

    Shape: as `Scores`.
    """

    logprobs: Tensor
    entropy: Tensor | None
    candidate_logprobs: Tensor | None
