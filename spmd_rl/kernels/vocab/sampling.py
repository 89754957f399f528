"""Sampling with keyed randomness: a draw depends on (seed, prompt, sample, position) alone.

It is Gumbel-max over the filtered distribution. The noise of a row's vocabulary entry i is made
from output number i of a SplitMix64 generator that is seeded by the row's key. So neither the batch
nor the order of requests matters.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.runtime.splitmix import GAMMA, mix_, next64, shift_right, signed
from spmd_rl.kernels.vocab.filters import filter_scores_
from spmd_rl.kernels.vocab.kept_words import KeptRows, pack_bits
from spmd_rl.kernels.vocab.logprob import token_logprobs

# rename it when draws change
RANDOM_SCHEME = "SplitMix64, Gumbel noise of 32 bits in float64, nuclei in whole 2^-40ths"


def stream_bases(
    seed: int | NDArray[np.int64], uid: NDArray[np.int64], index: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the 64-bit number from which the keys of a sample's tokens are made, one a row.

    Shape: arrays [M]. `uid` is the prompt's, and `index` the sample's within its group.
    """
    base = next64(np.broadcast_to(np.asarray(seed, dtype=np.int64), uid.shape).view(np.uint64))
    return _next(_next(base, uid), index).view(np.int64)


def stream_keys(
    seed: int, uid: NDArray[np.int64], index: NDArray[np.int64], position: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return a 64-bit key for each row: `position_keys` of `stream_bases`, on the host.

    Shape: arrays [M]. `position` is the token's within the response.
    """
    return _next(stream_bases(seed, uid, index).view(np.uint64), position).view(np.int64)


def _next(key: NDArray[np.uint64], part: NDArray[np.int64]) -> NDArray[np.uint64]:
    return next64(key + np.asarray(part, dtype=np.int64).view(np.uint64) * np.uint64(GAMMA))


def position_keys(bases: Tensor, positions: Tensor) -> Tensor:
    """Return the key of each row's token at `positions` of the response.

    Shape: both [M] int64, or broadcastable; returns int64.
    """
    return mix_(bases + (positions + 1) * signed(GAMMA))


def gumbel_noise(keys: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Return standard Gumbel noise for `vocab` entries of the vocabulary of every row, from the id
    `first` on.

    Shape: keys [M] int64; returns [M, V] fp32. With v = (bits + 1/2) / 2^32 the noise is
    -log(-log1p(-v)), so that the upper tail keeps all 32 bits.
    """
    ids = torch.arange(first, first + vocab, device=keys.device, dtype=torch.int64)
    bits = shift_right(position_keys(keys.unsqueeze(1), ids), 32)
    v = bits.double().add_(0.5).mul_(2.0**-32)
    return v.neg_().log1p_().neg_().log_().neg_().float()


def sample_and_score(
    logits: Tensor,
    inv_temperature: Tensor,
    bases: Tensor,
    positions: Tensor,
    *,
    greedy: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    given: Tensor | None = None,
    kept: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens with the keys of `positions`, and return them with their log-probabilities.

    On NVIDIA GPUs without filters the logits are read twice, and nothing depends on the host.
    Tokens that are `given` replace what was drawn, and go through the same kernels. With filters
    and `kept`, what they keep is written there, and log-probabilities are those over these sets.

    Shape: as `sample_tokens` and `token_logprobs`; bases, positions and given [M] int64; returns
    tokens [M] int64 and log-probabilities [M] fp32.
    """
    if logits.is_cuda and top_k is None and top_p is None and min_p is None:
        from spmd_rl.kernels.vocab.sampling_triton import gumbel_argmax_and_logprob

        return gumbel_argmax_and_logprob(logits, inv_temperature, bases, positions, greedy, given)
    filters = top_k, top_p, min_p
    if given is None or kept is not None:
        scores, scale = _filtered(logits, inv_temperature, greedy, filters, kept)
    if given is None:
        given = _draw(scores, scale, position_keys(bases, positions), greedy)
    words = None if kept is None else kept.words
    return given, token_logprobs(logits, given, inv_temperature, words)[0]


def sample_tokens(
    logits: Tensor,
    inv_temperature: Tensor,
    keys: Tensor,
    *,
    greedy: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Draw one token a row.

    Filters apply in the order top-k, top-p, min-p, each to the distribution at the row's
    temperature; `None` means off for all rows, and so do 0, 1 and 0 for one row. Greedy rows take
    the largest logit. Ties go to the lowest id.

    Shape: logits [M, V] fp32; all else [M] (`keys` int64, `greedy` bool, `top_k` int64); returns
    [M] int64.
    """
    filters = top_k, top_p, min_p
    return _draw(*_filtered(logits, inv_temperature, greedy, filters, None), keys, greedy)


def _draw(scores: Tensor, inv_temperature: Tensor, keys: Tensor, greedy: Tensor | None) -> Tensor:
    """Return the argmax of scores * inv_temperature + noise(keys), or of scores in greedy rows."""
    if scores.is_cuda:
        from spmd_rl.kernels.vocab.sampling_triton import gumbel_argmax

        return gumbel_argmax(scores, inv_temperature, keys, greedy)
    return noisy_scores(scores, inv_temperature, keys, greedy).argmax(dim=1)


def noisy_scores(
    scores: Tensor,
    inv_temperature: Tensor,
    keys: Tensor,
    greedy: Tensor | None,
    first: int = 0,
) -> Tensor:
    """Return what a draw on a CPU compares, of entries from the id `first` on. Shape: [M, V]."""
    noise = gumbel_noise(keys, scores.shape[1], first)
    if greedy is not None:
        inv_temperature = inv_temperature.masked_fill(greedy, 1.0)
        noise = noise.masked_fill(greedy.unsqueeze(1), 0.0)
    return scores * inv_temperature.unsqueeze(1) + noise


def _filtered(
    logits: Tensor,
    inv_temperature: Tensor,
    greedy: Tensor | None,
    filters: tuple[Tensor | None, Tensor | None, Tensor | None],
    kept: KeptRows | None,
) -> tuple[Tensor, Tensor]:
    """Return scores to draw from and their inverse temperature: the inputs without filters.

    With filters, scores are at their temperature, and minus infinity where filters reject. Greedy
    rows stay as they are. What filters keep is also written to `kept`.
    """
    if all(one is None for one in filters):
        return logits, inv_temperature
    one = torch.ones_like(inv_temperature)
    if logits.is_cuda:
        from spmd_rl.kernels.vocab.filter_triton import filtered

        return filtered(logits, inv_temperature, greedy, *filters, kept), one
    scores = filter_scores_(logits * inv_temperature.unsqueeze(1), *filters)
    if kept is not None:
        is_kept = (scores != -torch.inf) | ~kept.replays.unsqueeze(1)
        kept.words.copy_(pack_bits(is_kept))
    return scores if greedy is None else torch.where(greedy.unsqueeze(1), logits, scores), one
