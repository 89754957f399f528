"""Draws of parts of the vocabulary by the GPU's kernels, for Triton's interpreter.

It lacks the processor's logarithm and CUDA's library, so both are written with Triton's own.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.vocab import sampling_triton, vocab_parallel_triton
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, shard_size
from spmd_rl.kernels.vocab.sampling_triton import _mix
from spmd_rl.kernels.vocab.vocab_part import VocabPart
from tests.shared_ranks import Meeting, ThreadExchange


@triton.jit
def _log1p(x):
    return tl.log(1.0 + x)


@triton.jit
def _noise_bound(state):
    bits = (_mix(state) >> 32).to(tl.float64)
    return (1e-3 - tl.log(bits * 2.0**-32 + 2.0**-40)).to(tl.float32)


def _prepare() -> None:
    sampling_triton.libdevice = SimpleNamespace(log1p=_log1p)
    sampling_triton._noise_bound = _noise_bound
    sampling_triton.NUM_PROGRAMS = 6  # several blocks each


def of_one(*asked: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs of logits [M, V], inverse temperatures, bases, positions and greedy."""
    _prepare()
    return sampling_triton.gumbel_argmax_and_logprob(*asked)


def of_parts(count: int, backwards: bool, logits: Tensor, *asked: Tensor) -> tuple[Tensor, Tensor]:
    """The same by `count` ranks, one after the other; `backwards`, sums in another order."""
    _prepare()
    vocab, nobody = logits.shape[1], ThreadExchange(Meeting(1), 0)
    parts = [VocabPart(rank, count, vocab, nobody) for rank in range(count)]
    width = shard_size(vocab) * NUM_VOCAB_SHARDS // count
    own = [logits[:, part.first : part.first + width].contiguous() for part in parts]
    pairs = list(zip(own, parts, strict=True))
    given = [vocab_parallel_triton.entries(one, *asked, part) for one, part in pairs]
    entries = torch.cat(given, 1).view(len(logits), count, -1)
    sums = [vocab_parallel_triton.sums(one, asked[0], entries, part) for one, part in pairs]
    total = torch.cat(sums, 1)
    return vocab_parallel_triton.drawn(entries, total.flip(1) if backwards else total)
