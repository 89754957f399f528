"""GPU versions of the ops over the vocabulary, with plain tensors, for the interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.vocab import logprob_backward_triton, logprob_triton
from spmd_rl.kernels.vocab.lm_head import HeadRows, head_logprobs
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK, score_gradients
from spmd_rl.kernels.vocab.scores import Scores

logprob_triton.overlapping = dict  # type: ignore[assignment]
logprob_backward_triton.GRADIENT_BLOCK = 32
Plain = tuple[Tensor | None, ...]


def token(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    candidates: Tensor | None,
    grads: Plain,
) -> Plain:
    """Return scores and the gradient of the logits, as `token_scores` computes them on a GPU."""
    logprob, entropy, norms = logprob_triton.logprob_forward(
        logits, targets, inv_temperature, NUM_VOCAB_SHARDS, VOCAB_CHUNK
    )
    of_candidates = None
    if candidates is not None:
        of_candidates = logprob_triton.candidates_forward(
            logits, candidates, inv_temperature, norms
        )
    scores, out = Scores(logprob, entropy, of_candidates), torch.empty_like(logits)
    upstream = score_gradients(grads, scores)
    logprob_backward_triton.logprob_backward(
        upstream, scores, logits, targets, candidates, inv_temperature, norms, out
    )
    return *scores, out


def head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    candidates: Tensor | None,
    grads: Plain,
    num_rows: int,
    first: int = 0,
    end: int | None = None,
) -> Plain:
    """Return scores of `head_logprobs`, and the gradients of `hidden` and `weight`.

    They are those of a rank that has the rows of `weight` from `first` to `end`.
    """
    leaves = [one.clone().requires_grad_() for one in (hidden, weight[first:end])]

    def logits(rows: Tensor) -> Tensor:
        return rows.float() @ weight.float().t()

    scores = head_logprobs(
        *leaves, logits, targets, inv_temperature, num_rows,
        entropy_grad=grads[1] is not None, candidates=candidates,
        rows=HeadRows(first, len(weight)),
    )  # fmt: skip
    used = [(out, grad) for out, grad in zip(scores, grads, strict=True) if grad is not None]
    torch.autograd.backward(*(list(part) for part in zip(*used, strict=True)))
    return tuple(
        one if one is None else one.detach() for one in (*scores, *(leaf.grad for leaf in leaves))
    )


def head_twice(hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor) -> str:
    """Return what torch says to a second backward pass through the head."""
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    scores = head_logprobs(
        hidden, weight, lambda rows: rows @ weight.t(), targets, inv_temperature, len(hidden),
        entropy_grad=True,
    )  # fmt: skip
    scores.entropy.sum().backward(retain_graph=True)
    try:
        scores.entropy.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""
