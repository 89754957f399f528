"""Language-model head down to log-probabilities, whose gradient is found in the forward pass.

The gradient of a token's log-probability towards its logits is known up to one factor: the gradient
of the loss towards that log-probability. So the forward pass turns each chunk of fp32 logits into
these slopes, rounded to the weight's dtype, and drops the logits. The backward pass is two
products, whose rows are scaled by the factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK

Logits = Callable[[Tensor], Tensor]


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    logits: Logits,
    targets: Tensor,
    inv_temperature: Tensor,
    num_rows: int,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs` of the head's logits, on NVIDIA GPUs.

    At most `num_rows` rows of logits exist at once. `logits` multiplies rows of `hidden` with
    `weight` (`linear_fp32`); the backward pass assumes that product. It keeps slopes [M, V] in the
    weight's dtype.

    Shape: hidden [M, C], weight [V, C], targets [M] int64, inv_temperature [M] fp32; returns two
    tensors [M] fp32.
    """
    return _HeadLogprobs.apply(
        hidden, weight, logits, targets, inv_temperature, num_rows, kept, torch.is_grad_enabled()
    )


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        logits: Logits,
        targets: Tensor,
        inv_temperature: Tensor,
        num_rows: int,
        kept: KeptSets | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        from spmd_rl.kernels.vocab.logprob_triton import logprob_backward, logprob_forward

        logprob, entropy = (torch.empty_like(inv_temperature) for _ in range(2))
        one = torch.ones_like(inv_temperature)
        slopes = hidden.new_empty(len(hidden) if keeps else 0, len(weight), dtype=weight.dtype)
        for start in range(0, len(hidden), num_rows):
            part = slice(start, start + num_rows)
            inputs = logits(hidden[part]), targets[part], inv_temperature[part]
            words = None if kept is None else kept.words(part, len(weight))
            logprob[part], entropy[part], norms = logprob_forward(
                *inputs, NUM_VOCAB_SHARDS, VOCAB_CHUNK, words
            )
            if keeps:
                logprob_backward(one[part], *inputs, norms, slopes[part], words)
        ctx.save_for_backward(hidden, weight, slopes)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, slopes = ctx.saved_tensors
        factor = grads[0].unsqueeze(1)
        grad_hidden = (slopes @ weight).mul_(factor)
        grad_weight = slopes.t() @ (hidden * factor).to(hidden.dtype)
        return grad_hidden, grad_weight, *(None,) * 6
