"""Top-k, top-p and min-p by sorting: the CPU's filters, and the definition of the GPU's."""

from __future__ import annotations

import torch
from torch import Tensor

FILTERED_ENTRIES = 1 << 22  # entries that are sorted at a time, at some 49 bytes each
# Shares are whole multiples of 1 / NUCLEUS_UNITS of the likeliest entry's share: the sum of whole
# numbers does not depend on their order.
NUCLEUS_UNITS = 2.0**40


def distances(scores: Tensor) -> Tensor:
    """Return 1 plus how far each entry lies below its row's greatest. Shape: [M, V] fp32.

    Filters order entries by this distance, then by id. So entries within 2^-24 of the greatest are
    equal to it, and top-k of 1 takes the lowest id of these.
    """
    return scores.amax(dim=1, keepdim=True) - scores + 1


def filter_scores_(
    scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Set the entries that the filters reject to minus infinity, in place, some rows at a time.

    Shape: scores [M, V] fp32, all else [M]; returns `scores`.
    """
    num_rows, vocab = scores.shape
    step = max(1, FILTERED_ENTRIES // vocab)
    filters = (top_k, top_p, min_p)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        part = scores[rows]
        of_part = (None if one is None else one[rows] for one in filters)
        part.masked_fill_(_rejected(part, *of_part), -torch.inf)
    return scores


def _rejected(
    scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Return which entries the filters reject. Shape: as `scores`, bool."""
    ordered, order = distances(scores).sort(dim=1, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    dropped = torch.zeros_like(scores, dtype=torch.bool)
    if top_k is not None:
        dropped |= (top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1))
    # exp(score - greatest), so 1 for the likeliest entry
    terms = (1 - ordered).exp().masked_fill(dropped, 0.0)
    if top_p is not None:
        shares = (terms.double() * NUCLEUS_UNITS).long()
        sums = shares.cumsum(dim=1)
        enough = (top_p.double() * sums[:, -1].double()).ceil().long()
        reached = sums - shares >= enough.unsqueeze(1)
        dropped |= reached & (rank > 0) & (top_p.unsqueeze(1) < 1)
    if min_p is not None:
        dropped |= terms < min_p.unsqueeze(1)
    return torch.zeros_like(dropped).scatter_(1, order, dropped)
