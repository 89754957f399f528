"""Test data of attention to latents, chunks of sequences over pages, and a plain oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.row_tiles.tiles import PAGE


class LatentRows(NamedTuple):
    """Queries [T, H, D], keys [T, D] whose last elements are values, and gradients [T, H, C]."""

    q: Tensor
    keys: Tensor
    grad: Tensor


class Chunks(NamedTuple):
    """New tokens of some sequences: their numbers, and how many there are before and now."""

    chosen: list[int]
    starts: list[int]
    lengths: list[int]


def rows_of(total: int, heads: int, sizes: LatentSizes, dtype: torch.dtype) -> LatentRows:
    generator = torch.Generator().manual_seed(total)
    shapes = (total, heads, sum(sizes)), (total, sum(sizes)), (total, heads, sizes.latent)
    return LatentRows(*(torch.randn(one, generator=generator).to(dtype) for one in shapes))


def oracle(q: Tensor, keys: Tensor, lengths: list[int], sizes: LatentSizes) -> Tensor:
    """Attend in plain torch; differentiable."""
    outs = []
    for queries, own in zip(q.split(lengths), keys.split(lengths), strict=True):
        scores = torch.einsum("thd,sd->hts", queries, own) * q.shape[-1] ** -0.5
        unseen = torch.ones(scores.shape[1:], device=q.device).triu(1).bool()
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hts,sc->thc", weights, own[:, sizes.rotary :]))
    return torch.cat(outs)


def chunks_of(lengths: list[int], seed: int) -> Iterator[Chunks]:
    """Cut sequences anywhere, and take some of them at a time."""
    rng, done, ends = np.random.default_rng(seed), np.zeros(len(lengths), int), np.array(lengths)
    while (left := np.flatnonzero(done < ends)).size:
        chosen = left[rng.random(len(left)) < 0.8]
        if not len(chosen):
            continue
        most = rng.choice([1, 1, 40])
        counts = np.minimum(rng.integers(1, most + 1, len(chosen)), (ends - done)[chosen])
        yield Chunks(chosen.tolist(), done[chosen].tolist(), counts.tolist())
        done[chosen] += counts


def pages_of(lengths: list[int], seed: int) -> Tensor:
    """Place the pages of sequences at random, some free ones between. Shape: [B, P] int64."""
    counts = [-(-length // PAGE) for length in lengths]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3)
    table = np.full((len(lengths), max(counts)), -1)
    for row, own in zip(table, np.split(order, np.cumsum(counts))[:-1], strict=True):
        row[: len(own)] = own
    return torch.from_numpy(table)


def tokens_of(lengths: list[int], step: Chunks) -> Tensor:
    """Return where the new tokens of a step are, where sequences lie end to end."""
    begins = np.cumsum(lengths) - lengths
    spans = zip(step.chosen, step.starts, step.lengths, strict=True)
    parts = [np.arange(begins[one] + start, begins[one] + start + n) for one, start, n in spans]
    return torch.from_numpy(np.concatenate(parts))


def slots_of(pages: Tensor, step: Chunks) -> Tensor:
    """Return where the keys of a step's new tokens go."""
    parts = []
    for one, start, length in zip(step.chosen, step.starts, step.lengths, strict=True):
        place = torch.arange(start, start + length)
        parts.append(pages[one, place // PAGE] * PAGE + place % PAGE)
    return torch.cat(parts)
