"""Log-probability of chosen tokens: the last op of both the sampler and the trainer.

z = logits * invT. The maximum m is exact. s = sum exp(z - m) is taken over eight virtual vocabulary
shards, in chunks of at most 1,024; each sum runs along a contiguous dimension of fixed length.
log p = (z_t - m) - log s. The shape of that sum depends on the vocabulary alone.

The gradients towards logit j are invT * ([j = t] - p_j) of log p, and -invT * p_j * (log p_j + H)
of the entropy H.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.vocab.kept_words import unpack_bits
from spmd_rl.kernels.vocab.scores import ScoreGradients, Scores

NUM_VOCAB_SHARDS = 8
VOCAB_CHUNK = 1024
TEMPERATURE_RULE = "logits * (1 / T), rounded to float32"  # rename it when the rule changes


def token_logprobs(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of `targets` and the entropy of each row, at its temperature.

    Both are differentiable in `logits`. An entropy that the loss ignores costs nothing in the
    backward pass. With `words`, both are those of the distribution over each row's set
    (`kept_words.py`): the other logits count as minus infinity.

    Shape: logits [M, V] fp32, targets [M] int64, inv_temperature [M] fp32, words [M, W] int32;
    returns two tensors [M] fp32.
    """
    logprobs, entropy, _ = call(_TokenScores, logits, targets, inv_temperature, None, words)
    return logprobs, entropy


def candidate_logprobs(logits: Tensor, candidates: Tensor, inv_temperature: Tensor) -> Tensor:
    """Return the log-probabilities of K given tokens of each row, differentiable in `logits`.

    They have the bits of `token_logprobs`. A row may name a token more than once.

    Shape: logits [M, V] fp32, candidates [M, K] int64, inv_temperature [M] fp32; returns [M, K]
    fp32.
    """
    targets = candidates[:, 0].contiguous()
    logprobs: Tensor = call(_TokenScores, logits, targets, inv_temperature, candidates, None)[2]
    return logprobs


def token_scores(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    candidates: Tensor | None,
    words: Tensor | None = None,
) -> Scores:
    """Return `token_logprobs` and `candidate_logprobs` of one pass over the logits.

    With `words`, candidates outside of a row's set have a log-prob of minus infinity.

    Shape: logits [M, V] fp32, targets [M] int64, inv_temperature [M] fp32, candidates [M, K] int64,
    words [M, W] int32.
    """
    return Scores(*call(_TokenScores, logits, targets, inv_temperature, candidates, words))


def shard_size(vocab: int) -> int:
    """Return how many entries a shard of the vocabulary has; the last ones may have fewer."""
    return -(-vocab // NUM_VOCAB_SHARDS)


def chunk_sums(terms: Tensor, shard: int, num_shards: int = NUM_VOCAB_SHARDS) -> Tensor:
    """Sum each chunk of some shards of the vocabulary, on a CPU.

    The contract's sum is that of the chunks of all shards, in one dimension.
    Shape: terms [M, up to num_shards * shard]; returns [M, num_shards * chunks of a shard].
    """
    num_rows, vocab = terms.shape
    chunk = min(shard, VOCAB_CHUNK)
    num_chunks = -(-shard // chunk)
    if num_shards * shard != vocab:
        terms = F.pad(terms, (0, num_shards * shard - vocab))
    terms = terms.view(num_rows, num_shards, shard)
    if num_chunks * chunk != shard:
        terms = F.pad(terms, (0, num_chunks * chunk - shard))
    return terms.reshape(num_rows, num_shards * num_chunks, chunk).sum(-1)


def _sum_exp(terms: Tensor) -> Tensor:
    """Sum the last dimension [M, V] in the contract's order."""
    return chunk_sums(terms, shard_size(terms.shape[1])).sum(-1)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        inv_temperature: Tensor,
        candidates: Tensor | None,
        words: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        inputs = targets, inv_temperature, candidates
        of_candidates = None
        if logits.is_cuda:
            from spmd_rl.kernels.vocab.logprob_triton import candidates_forward, logprob_forward

            logits = dense(logits)
            logprob, entropy, norms = logprob_forward(
                logits, targets, inv_temperature, NUM_VOCAB_SHARDS, VOCAB_CHUNK, words
            )
            if candidates is not None:
                of_candidates = candidates_forward(logits, candidates, inv_temperature, norms)
            ctx.save_for_backward(logits, norms, words, *inputs, logprob, entropy, of_candidates)
            return logprob, entropy, of_candidates
        shifted = logits * inv_temperature.unsqueeze(1)
        dropped = None if words is None else ~unpack_bits(words, logits.shape[1])
        if dropped is not None:
            shifted.masked_fill_(dropped, -torch.inf)
        shifted -= shifted.amax(dim=1, keepdim=True)
        terms = shifted.exp()
        total = _sum_exp(terms)
        log_total = total.log()
        logprob = shifted.gather(1, targets.unsqueeze(1)).squeeze(1) - log_total
        if candidates is not None:
            of_candidates = shifted.gather(1, candidates) - log_total.unsqueeze(1)
        probs = terms.div_(total.unsqueeze(1))
        if dropped is not None:
            shifted.masked_fill_(dropped, 0.0)
        entropy = log_total - shifted.mul_(probs).sum(-1)
        ctx.save_for_backward(probs, None, None, *inputs, logprob, entropy, of_candidates)
        return logprob, entropy, of_candidates

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, norms, words, targets, inv_temperature, candidates, *results = ctx.saved_tensors
        scores = Scores(*results)
        upstream = score_gradients(grads, scores)
        if not kept.is_cuda:
            inputs = targets, inv_temperature, candidates
            return _logit_gradient(upstream, scores, kept, *inputs), *(None,) * 4
        from spmd_rl.kernels.vocab.logprob_backward_triton import logprob_backward

        out = torch.empty_like(kept)
        inputs = targets, candidates, inv_temperature
        logprob_backward(upstream, scores, kept, *inputs, norms, out, words=words)
        return out, *(None,) * 4


def score_gradients(grads: tuple[Tensor | None, ...], scores: Scores) -> ScoreGradients:
    """Return the gradients that autograd gave, with zeros for log-probs that the loss ignores."""
    logprobs, *others = grads
    return ScoreGradients(
        torch.zeros_like(scores.logprobs) if logprobs is None else logprobs, *others
    )


def _logit_gradient(
    grads: ScoreGradients,
    scores: Scores,
    probs: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    candidates: Tensor | None,
) -> Tensor:
    """Return the gradient towards the logits, from their probabilities. Shape: [M, V]."""
    scale = (grads.logprobs * inv_temperature).unsqueeze(1)
    of_candidates = of_entropy = None
    total = scale
    if grads.candidate_logprobs is not None:
        of_candidates = grads.candidate_logprobs * inv_temperature.unsqueeze(1)
        total = total + of_candidates.sum(1, keepdim=True)
    if grads.entropy is not None:
        of_entropy = (grads.entropy * inv_temperature).unsqueeze(1)
        total = total + of_entropy * scores.entropy.unsqueeze(1)
    grad = probs * -total
    if of_entropy is not None:
        grad.addcmul_(torch.special.entr(probs), of_entropy)  # entr(p) = -p * log p, 0 at p = 0
    grad.scatter_add_(1, targets.unsqueeze(1), scale)
    if candidates is not None and of_candidates is not None:
        grad.scatter_add_(1, candidates, of_candidates)
    return grad
