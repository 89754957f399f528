"""Calls of the GPU's kernels for kept sets, which return what the kernels write."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.vocab import (
    filter_triton,
    kept_sets_triton,
    logprob_backward_triton,
    logprob_triton,
)
from spmd_rl.kernels.vocab.kept_sets_triton import decoded, encode_rows
from spmd_rl.kernels.vocab.kept_words import EncodedRows, KeptRows
from spmd_rl.kernels.vocab.scores import ScoreGradients, Scores

NUM_STEPS = 2
CPU = torch.device("cpu")


def call(name: str, *arguments: Tensor | int) -> tuple[Tensor, ...]:
    return {"encode": encode, "decode": decode, "filter": keep, "score": score}[name](*arguments)


def encode(words: Tensor, replays: Tensor, vocab: int, turn: Tensor) -> tuple[Tensor, ...]:
    for name, value in {"WORD_BLOCK": 64, "ID_BLOCK": 8, "CAPACITY": 32, "DATA_BYTES": 100}.items():
        setattr(kept_sets_triton, name, value)
    out = EncodedRows.empty((NUM_STEPS, len(words) + 1), vocab, CPU)
    out = out._replace(data=out.data[..., : kept_sets_triton.DATA_BYTES].contiguous())
    for tensor in out[:3]:
        tensor.zero_()
    encode_rows(KeptRows(replays, words), out, turn)
    return out[:3]


def decode(data: Tensor, starts: Tensor, stops: Tensor, vocab: int) -> tuple[Tensor]:
    kept_sets_triton.BYTE_BLOCK = 16
    return (decoded(data, starts, stops, vocab),)


def keep(
    logits: Tensor, scale: Tensor, replays: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    filter_triton.BLOCK, filter_triton.NUM_PROGRAMS = 32, 2 * len(logits)
    kept = KeptRows.empty(replays, logits.shape[1])
    return filter_triton.filtered(logits, scale, None, top_k, top_p, min_p, kept), kept.words


def score(
    logits: Tensor, targets: Tensor, scale: Tensor, words: Tensor | None
) -> tuple[Tensor, ...]:
    """Return log-probs, entropy, and the gradient of their sum: from the logits, and in place."""
    logprob_backward_triton.GRADIENT_BLOCK = 32
    logprobs, entropy, norms = logprob_triton.logprob_forward(logits, targets, scale, 8, 4, words)
    ones, shifted = torch.ones_like(scale), torch.empty_like(logits)
    logprob_backward_triton.shift_logits(logits, scale, norms, shifted, words)
    grads, scores = ScoreGradients(ones, ones, None), Scores(logprobs, entropy, None)
    gradient, rest = torch.empty_like(logits), (targets, None, scale, norms)
    backward = logprob_backward_triton.logprob_backward
    backward(grads, scores, logits, *rest, gradient, words=words)
    backward(grads, scores, shifted, *rest, shifted, is_shifted=True)
    return logprobs, entropy, gradient, shifted
