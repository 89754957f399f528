"""Language-model head down to log-probabilities, whose logits are dropped in the forward pass.

The gradient of a token's log-probability towards its logits is known up to one factor: the gradient
of the loss towards that log-probability. So the forward pass turns each chunk of fp32 logits into
these slopes, rounded to the weight's dtype, and drops the logits. The backward pass is two
products, whose rows are scaled by the factor.

With a gradient of the entropy or of candidates there is more than one factor. Then the forward pass
keeps the distances of the logits to their row's maximum, in as many bytes as the slopes take. The
backward pass writes the gradient of the logits over them, and multiplies it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK, score_gradients
from spmd_rl.kernels.vocab.scores import ScoreGradients, Scores

Logits = Callable[[Tensor], Tensor]


class HeadRows(NamedTuple):
    """The first row of the head that a rank has, and how many the vocabulary has."""

    first: int
    vocab_size: int


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    logits: Logits,
    targets: Tensor,
    inv_temperature: Tensor,
    num_rows: int,
    *,
    entropy_grad: bool = False,
    candidates: Tensor | None = None,
    kept: KeptSets | None = None,
    rows: HeadRows | None = None,
) -> Scores:
    """Return `token_scores` of the head's logits, on NVIDIA GPUs.

    The entropy is differentiable with `entropy_grad`. With `kept`, scores are those over each
    token's set. At most `num_rows` rows of logits exist at once. `logits` multiplies rows of
    `hidden` with `weight` (`linear_fp32`); the backward pass assumes that product. It keeps [M, V]
    elements of the weight's size.

    Where ranks share the head, `rows` says which a rank has. Then `logits` returns those of all,
    and a backward pass this rank's part of the gradient of `hidden`. For the log-probs alone, it
    keeps [M, V'] elements.

    Shape: hidden [M, C], weight [V, C] or of some rows [V', C], targets [M] int64, inv_temperature
    [M] fp32, candidates [M, K] int64.
    """
    rows = rows or HeadRows(0, len(weight))
    given = logits, targets, inv_temperature, num_rows, kept
    head = _HeadInputs(*given, torch.is_grad_enabled(), rows)
    if not entropy_grad and candidates is None:
        logprobs, entropy = _HeadLogprobs.apply(hidden, weight, head)
        return Scores(logprobs, entropy, None)
    scores = Scores(*_HeadScores.apply(hidden, weight, head, candidates))
    return scores if entropy_grad else scores._replace(entropy=scores.entropy.detach())


class _HeadInputs(NamedTuple):
    """Inputs of `head_logprobs` that have no gradient, and whether a backward pass may follow."""

    logits: Logits
    targets: Tensor
    inv_temperature: Tensor
    num_rows: int
    kept: KeptSets | None
    keeps: bool
    own: HeadRows

    def chunks(self, hidden: Tensor) -> Iterator[_HeadChunk]:
        for start in range(0, len(hidden), self.num_rows):
            rows = slice(start, start + self.num_rows)
            logits = self.logits(hidden[rows])
            words = None if self.kept is None else self.kept.words(rows, logits.shape[1])
            yield _HeadChunk(rows, logits, self.targets[rows], self.inv_temperature[rows], words)

    def columns(self, weight: Tensor) -> slice:
        """Return which columns of all logits are those of `weight`."""
        return slice(self.own.first, self.own.first + len(weight))


class _HeadChunk(NamedTuple):
    """Some rows with their logits; `words` are their sets, None for the whole vocabulary."""

    rows: slice
    logits: Tensor
    targets: Tensor
    inv_temperature: Tensor
    words: Tensor | None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: _HeadInputs
    ) -> tuple[Tensor, Tensor]:
        from spmd_rl.kernels.vocab.logprob_backward_triton import logprob_backward
        from spmd_rl.kernels.vocab.logprob_triton import logprob_forward

        logprob, entropy = (torch.empty_like(head.inv_temperature) for _ in range(2))
        one = torch.ones_like(head.inv_temperature)
        shape = len(hidden) if head.keeps else 0, len(weight)
        slopes = hidden.new_empty(shape, dtype=weight.dtype)
        is_whole = len(weight) == head.own.vocab_size
        for part, logits, targets, inv_temperature, words in head.chunks(hidden):
            logprob[part], entropy[part], norms = logprob_forward(
                logits, targets, inv_temperature, NUM_VOCAB_SHARDS, VOCAB_CHUNK, words
            )
            if head.keeps:
                scores = Scores(logprob[part], entropy[part], None)
                grads = ScoreGradients(one[part], None, None)
                out = slopes[part] if is_whole else torch.empty_like(logits, dtype=weight.dtype)
                logprob_backward(
                    grads, scores, logits, targets, None, inv_temperature, norms, out, words=words
                )
                if not is_whole:
                    slopes[part] = out[:, head.columns(weight)]
        ctx.save_for_backward(hidden, weight, slopes)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, slopes = ctx.saved_tensors
        factor = grads[0].unsqueeze(1)
        grad_hidden = (slopes @ weight).mul_(factor)
        grad_weight = slopes.t() @ (hidden * factor).to(hidden.dtype)
        return grad_hidden, grad_weight, None


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: _HeadInputs, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        from spmd_rl.kernels.vocab.logprob_backward_triton import shift_logits
        from spmd_rl.kernels.vocab.logprob_triton import candidates_forward, logprob_forward

        ctx.set_materialize_grads(False)
        logprob, entropy = (torch.empty_like(head.inv_temperature) for _ in range(2))
        norms = logprob.new_empty(2, len(logprob))
        found: list[Tensor] = []
        shape = len(hidden) if head.keeps else 0, head.own.vocab_size
        kept = hidden.new_empty(shape, dtype=_same_size_float(weight.dtype))
        for part, logits, targets, inv_temperature, words in head.chunks(hidden):
            logprob[part], entropy[part], norms[:, part] = logprob_forward(
                logits, targets, inv_temperature, NUM_VOCAB_SHARDS, VOCAB_CHUNK, words
            )
            if candidates is not None:
                found.append(
                    candidates_forward(logits, candidates[part], inv_temperature, norms[:, part])
                )
            if head.keeps:
                shift_logits(logits, inv_temperature, norms[:, part], kept[part], words)
        of_candidates = None if candidates is None else torch.cat(found)
        inputs = head.targets, head.inv_temperature, candidates
        ctx.columns = head.columns(weight)
        ctx.save_for_backward(hidden, weight, kept, norms, *inputs, logprob, entropy, of_candidates)
        return logprob, entropy, of_candidates

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        from spmd_rl.kernels.vocab.logprob_backward_triton import logprob_backward

        hidden, weight, kept, norms, *inputs = ctx.saved_tensors
        targets, inv_temperature, candidates, *results = inputs
        scores = Scores(*results)
        upstream = score_gradients(grads, scores)
        grad_logits = kept.view(weight.dtype)
        logprob_backward(
            upstream, scores, kept, targets, candidates, inv_temperature, norms, grad_logits,
            is_shifted=True,
        )  # fmt: skip
        # A second backward pass would read gradients as logits: torch now refuses it.
        torch.autograd.graph.increment_version(kept)
        own = grad_logits[:, ctx.columns]
        return own @ weight, own.t() @ hidden, None, None


def _same_size_float(dtype: torch.dtype) -> torch.dtype:
    """Return the float of the same size whose distances to a maximum are the most precise."""
    return torch.float16 if dtype.itemsize == 2 else dtype
