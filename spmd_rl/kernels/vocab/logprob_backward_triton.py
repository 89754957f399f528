"""Gradients of log-probabilities and entropy on NVIDIA GPUs, in one pass over the logits.

Probabilities are recomputed from the logits, so only a row's maximum and sum are kept beside them.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.vocab.logprob_triton import is_kept
from spmd_rl.kernels.vocab.scores import ScoreGradients, Scores

GRADIENT_BLOCK = 4096
LEAST_SHIFTED = tl.constexpr(-65504.0)  # the least finite float16


def logprob_backward(
    grads: ScoreGradients,
    scores: Scores,
    logits: Tensor,
    targets: Tensor,
    candidates: Tensor | None,
    inv_temperature: Tensor,
    norms: Tensor,
    out: Tensor,
    *,
    words: Tensor | None = None,
    is_shifted: bool = False,
) -> None:
    """Write the gradient of the logits [M, V] to `out`, which is contiguous.

    With `words` [M, W] int32, the scores were those of each row's set, outside of which the
    gradient is 0. With `is_shifted`, `logits` are what `shift_logits` wrote, and `out` may be their
    memory. Then sets are not needed again.
    """
    num_rows, vocab = logits.shape
    grad, total, entropy, entropy_grad = grads.logprobs.contiguous(), None, None, None
    if grads.entropy is not None:
        total, entropy, entropy_grad = grad, scores.entropy, grads.entropy.contiguous()
    if grads.candidate_logprobs is not None:
        total = grad + grads.candidate_logprobs.sum(1)
    _gradient[(num_rows, triton.cdiv(vocab, GRADIENT_BLOCK))](
        grad,
        total,
        entropy_grad,
        logits,
        targets,
        inv_temperature,
        None if is_shifted else norms[0],
        norms[1],
        entropy,
        words,
        out,
        vocab,
        GRADIENT_BLOCK,
        num_warps=8,
    )
    if grads.candidate_logprobs is None or candidates is None:
        return
    count = candidates.shape[1]
    _candidate_gradient[(num_rows,)](
        grad, total, entropy_grad, grads.candidate_logprobs.contiguous(), targets,
        candidates.contiguous(), inv_temperature, scores.candidate_logprobs, entropy, out, vocab,
        count, BLOCK=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip


def shift_logits(
    logits: Tensor,
    inv_temperature: Tensor,
    norms: Tensor,
    out: Tensor,
    words: Tensor | None = None,
) -> None:
    """Write logits * inv_temperature, less the row's maximum, to `out`, which is contiguous.

    Half precision keeps the distance of likely tokens to the likeliest one best. What is too far
    away for it has a probability of 0, and so is what lies outside of a row's set.
    Shape: logits, out [M, V]; norms [2, M] as of `logprob_forward`; words [M, W] int32.
    """
    num_rows, vocab = logits.shape
    _shift[(num_rows, triton.cdiv(vocab, GRADIENT_BLOCK))](
        logits, inv_temperature, norms[0], words, out, vocab, GRADIENT_BLOCK, num_warps=8
    )


@triton.jit
def _shift(logits, inv_temperature, row_max, words, out, vocab, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    kept = inside
    if words is not None:
        kept = inside & is_kept(words, row, column, vocab)
    score = tl.load(logits + row * vocab + column, mask=kept, other=0.0)
    shifted = score * tl.load(inv_temperature + row) - tl.load(row_max + row)
    shifted = tl.maximum(shifted, LEAST_SHIFTED)
    if words is not None:
        shifted = tl.where(kept, shifted, LEAST_SHIFTED)
    tl.store(out + row * vocab + column, shifted.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    grad, total, entropy_grad, logits, targets, inv_temperature, row_max, row_sum, entropy, words,
    out, vocab, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store a row's gradient, of the log-prob alone without `total`.

    `total` adds up the gradients of the row's log-probs. Those of candidates are stored afterwards.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    kept = inside
    if words is not None:
        kept = inside & is_kept(words, row, column, vocab)
    scale = tl.load(inv_temperature + row)
    shifted = tl.load(logits + row * vocab + column, mask=kept, other=0.0).to(tl.float32)
    if row_max is not None:
        shifted = shifted * scale - tl.load(row_max + row)
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    if total is None:
        prob = tl.exp(shifted) / tl.load(row_sum + row)
        result = tl.load(grad + row) * scale * (hit - prob)
    else:
        logprob = shifted - tl.log(tl.load(row_sum + row))
        common = _common_term(logprob, total, entropy_grad, entropy, row)
        result = scale * (tl.load(grad + row) * hit - common)
    if words is not None:
        result = tl.where(kept, result, 0.0)
    tl.store(out + row * vocab + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _common_term(logprob, total, entropy_grad, entropy, row) -> tl.tensor:
    """Return p * (total + entropy_grad * (log p + H)), which every token's gradient loses."""
    factor = tl.load(total + row)
    if entropy is not None:
        factor += tl.load(entropy_grad + row) * (logprob + tl.load(entropy + row))
    return tl.exp(logprob) * factor


@triton.jit
def _candidate_gradient(
    grad, total, entropy_grad, candidate_grads, targets, candidates, inv_temperature, logprobs,
    entropy, out, vocab, count, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients at a row's candidates. Equal candidates store equal values."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = place < count
    column = tl.load(candidates + row * count + place, mask=inside, other=0)
    own = tl.where(column == tl.load(targets + row), tl.load(grad + row), 0.0)
    for other in range(count):
        is_equal = column == tl.load(candidates + row * count + other)
        own += tl.where(is_equal, tl.load(candidate_grads + row * count + other), 0.0)
    logprob = tl.load(logprobs + row * count + place, mask=inside, other=0.0)
    common = _common_term(logprob, total, entropy_grad, entropy, row)
    result = tl.load(inv_temperature + row) * (own - common)
    tl.store(out + row * vocab + column, result.to(out.dtype.element_ty), mask=inside)
