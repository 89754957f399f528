"""Sinks: a logit of each head that takes a share of its softmax, and has no value.

Any kernel that gives the logs of its denominators is followed by what is here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs without the share of sinks, and the logs of the denominators with them.

    Shape: out [T, H, D], log_sum [T, H] fp32, natural; sinks [H].
    """
    wide = sinks.float()
    share = (wide - log_sum).exp_().add_(1.0).reciprocal_()
    return (out.float() * share.unsqueeze(-1)).to(out.dtype), torch.logaddexp(log_sum, wide)


def gradient_of_sinks(sinks: Tensor, log_sum: Tensor, inner: Tensor) -> Tensor:
    """Return the gradient of sinks [H], of denominators that have them.

    `inner` is the inner product of each output with its gradient. Shape: [T, H] fp32 both.
    """
    lost = (sinks.float() - log_sum).exp_().mul_(inner)
    return -lost.nan_to_num_(0.0, 0.0, 0.0).sum(0).to(sinks.dtype)
