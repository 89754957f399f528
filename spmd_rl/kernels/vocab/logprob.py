"""Log-probability of chosen tokens: the last op of both the sampler and the trainer.

z = logits * invT. The maximum m is exact. s = sum exp(z - m) is taken over eight virtual vocabulary
shards, in chunks of at most 1,024; each sum runs along a contiguous dimension of fixed length.
log p = (z_t - m) - log s. The shape of that sum depends on the vocabulary alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.vocab.kept_words import unpack_bits

NUM_VOCAB_SHARDS = 8
VOCAB_CHUNK = 1024
TEMPERATURE_RULE = "logits * (1 / T), rounded to float32"  # rename it when the rule changes


def token_logprobs(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of `targets` and the entropy of each row, at its temperature.

    With `kept`, both are those of the distribution over each row's set (`kept_words.py`): the other
    logits count as minus infinity.
    Only the log-probability is differentiable in `logits`: the entropy is a measurement.

    Shape: logits [M, V] fp32, targets [M] int64, inv_temperature [M] fp32, kept [M, W] int32;
    returns two tensors [M] fp32.
    """
    return call(_TokenLogprobs, logits, targets, inv_temperature, kept)


def _sum_exp(terms: Tensor) -> Tensor:
    """Sum the last dimension [M, V] in the contract's order."""
    num_rows, vocab = terms.shape
    shard = -(-vocab // NUM_VOCAB_SHARDS)
    chunk = min(shard, VOCAB_CHUNK)
    num_chunks = -(-shard // chunk)
    if NUM_VOCAB_SHARDS * shard != vocab:
        terms = F.pad(terms, (0, NUM_VOCAB_SHARDS * shard - vocab))
    terms = terms.view(num_rows, NUM_VOCAB_SHARDS, shard)
    if num_chunks * chunk != shard:
        terms = F.pad(terms, (0, num_chunks * chunk - shard))
    return terms.reshape(num_rows, NUM_VOCAB_SHARDS * num_chunks, chunk).sum(-1).sum(-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, inv_temperature: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if logits.is_cuda:
            from spmd_rl.kernels.vocab.logprob_triton import logprob_forward

            logits = dense(logits)
            logprob, entropy, norms = logprob_forward(
                logits, targets, inv_temperature, NUM_VOCAB_SHARDS, VOCAB_CHUNK, kept
            )
            ctx.save_for_backward(logits, targets, inv_temperature, norms, kept)
            ctx.mark_non_differentiable(entropy)
            return logprob, entropy
        shifted = logits * inv_temperature.unsqueeze(1)
        dropped = None if kept is None else ~unpack_bits(kept, logits.shape[1])
        if dropped is not None:
            shifted.masked_fill_(dropped, -torch.inf)
        shifted -= shifted.amax(dim=1, keepdim=True)
        terms = shifted.exp()
        total = _sum_exp(terms)
        log_total = total.log()
        logprob = shifted.gather(1, targets.unsqueeze(1)).squeeze(1) - log_total
        probs = terms.div_(total.unsqueeze(1))
        if dropped is not None:
            shifted.masked_fill_(dropped, 0.0)
        entropy = log_total - shifted.mul_(probs).sum(-1)
        ctx.save_for_backward(probs, targets, inv_temperature)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if grads[0].is_cuda:
            from spmd_rl.kernels.vocab.logprob_triton import logprob_backward

            logits, targets, inv_temperature, norms, kept = ctx.saved_tensors
            grad = torch.empty_like(logits)
            logprob_backward(grads[0], logits, targets, inv_temperature, norms, grad, kept)
            return grad, None, None, None
        probs, targets, inv_temperature = ctx.saved_tensors
        scale = (grads[0] * inv_temperature).unsqueeze(1)
        grad = probs * -scale
        grad.scatter_add_(1, targets.unsqueeze(1), scale)
        return grad, None, None, None
