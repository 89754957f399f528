"""Test data of attention, sequences fed to a paged cache in chosen steps, and a plain oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels import KvCache, PackedAttention, PagedAttention
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach
from spmd_rl.kernels.runtime.padding import padded_rows
from tests.specs import kv_layers

Data = tuple[Tensor, Tensor, Tensor]
LARGEST, LARGE_KEY = 3.0e38, 1.0e36  # finite; on the CPU a key's products must be too


@dataclass(frozen=True)
class Heads:
    query: int
    key: int
    dim: int


def qkv(
    total: int, heads: Heads, seed: int = 0, *, dtype: torch.dtype, device: torch.device
) -> Data:
    generator = torch.Generator(device).manual_seed(seed)

    def rows(count: int) -> Tensor:
        return (torch.randn(total, count, heads.dim, device=device, generator=generator) * 1.5).to(
            dtype
        )

    return rows(heads.query), rows(heads.key), rows(heads.key)


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    heads: Heads,
    split: int = 0,
    exponents: tuple[int, int] | None = None,
    reach: Reach = WHOLE,
) -> Tensor:
    attend = PackedAttention(np.array(lengths), device=q.device, split=split, exponents=exponents)
    return attend(0, q, k, v, reach=reach)


def oracle(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], heads: Heads) -> Tensor:
    """Attend in plain torch on the CPU, in any dtype. Shape: as `packed`, without padding."""
    outs = []
    for one_q, one_k, one_v in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        groups = heads.query // heads.key
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (one_k, one_v))
        scores = one_q.transpose(0, 1) @ keys.transpose(1, 2) * heads.dim**-0.5
        unseen = torch.ones(scores.shape[1:]).triu(1).bool()
        outs.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)


class Paged:
    """Feed sequences to a paged cache in steps that a test chooses, with pages placed at random.

    Every other step is padded. With `poison`, slots that are not written yet hold large numbers,
    and pages that no sequence has hold NaN.
    """

    def __init__(
        self,
        lengths: list[int],
        heads: Heads,
        page_size: int,
        poison: bool = False,
        split: int = 0,
        *,
        seed: int = 1,
        exponents: tuple[int, int] | None = None,
        reach: Reach = WHOLE,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.lengths, self.heads, self.page_size, self.seed = lengths, heads, page_size, seed
        self.reach = reach
        counts = [-(-n // page_size) for n in lengths]
        order = np.random.default_rng(seed).permutation(sum(counts) + 5)
        self.tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
        self.cache = KvCache(
            kv_layers(1, heads.key, heads.dim, heads.query),
            num_pages=len(order),
            page_size=page_size,
            dtype=dtype,
            device=device,
            split=split,
            exponents=exponents,
        )
        if poison:
            self._poison(torch.from_numpy(order[sum(counts) :]).to(device))
        self.done = np.zeros(len(lengths), dtype=np.int64)
        self.padded = False

    def _poison(self, free: Tensor) -> None:
        for pages, large in zip(self.cache.layers[0], (LARGE_KEY, LARGEST), strict=True):
            if self.cache.backend.fuses_write:
                pages.fill_(LARGEST)[free] = torch.nan
            else:
                pages.fill_(large).unflatten(1, (-1, self.page_size))[:, free] = torch.nan

    def step(
        self, chosen: dict[int, int], q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute `chosen` new tokens of each sequence; return their rows of q and the outputs."""
        firsts = np.cumsum([0, *self.lengths])
        names, rows, slots = list(chosen), [], []
        for name in names:
            span = np.arange(self.done[name], self.done[name] + chosen[name])
            rows.append(firsts[name] + span)
            slots.append(
                self.tables[name][span // self.page_size] * self.page_size + span % self.page_size
            )
        width = max(len(self.tables[name]) for name in names)
        attend = PagedAttention.chunks(
            self.cache,
            page_table=np.stack(
                [np.pad(self.tables[n], (0, width - len(self.tables[n]))) for n in names]
            ),
            starts=self.done[names],
            lengths=np.array([chosen[name] for name in names]),
            slots=np.concatenate(slots),
        )
        pick = torch.from_numpy(np.concatenate(rows)).to(q.device)
        self.padded = not self.padded
        pad = pick.new_zeros(padded_rows(len(pick)) - len(pick) if self.padded else 0)
        out = attend(0, *(x[torch.cat([pick, pad])] for x in (q, k, v)), reach=self.reach)
        assert len(out) == len(pick) + len(pad)
        out = out[: len(pick)]
        self.done[names] += [chosen[name] for name in names]
        return pick, out

    def chunks(self, data: Data, sizes: list[int]) -> Tensor:
        """Compute all sequences to their end, in chunks of random size and in random company."""
        rng, out = np.random.default_rng(self.seed), torch.empty_like(data[0])
        while len(waiting := np.flatnonzero(self.done < self.lengths)):
            some = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)]
            chosen = {
                int(n): int(min(self.lengths[n] - self.done[n], rng.choice(sizes))) for n in some
            }
            rows, part = self.step(chosen, *data)
            out[rows] = part
        return out

    def decoding(self, data: Data, num_tokens: int) -> Tensor:
        """Compute all but `num_tokens` of each sequence, then the rest one token at a time."""
        out = torch.empty_like(data[0])
        chosen = {n: max(1, length - num_tokens) for n, length in enumerate(self.lengths)}
        while chosen:
            rows, part = self.step(chosen, *data)
            out[rows] = part
            chosen = dict.fromkeys(np.flatnonzero(self.done < self.lengths).tolist(), 1)
        return out
