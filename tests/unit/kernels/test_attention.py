"""Packed training attention against paged decoding, bit for bit; and both against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import KvCache, PackedAttention, PagedAttention
from spmd_rl.kernels.tile import padded_rows

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Heads:
    query: int
    key: int
    dim: int


HEADS = [Heads(4, 2, 16), Heads(4, 4, 32), Heads(7, 1, 8), Heads(6, 2, 64)]


def qkv(lengths: list[int], heads: Heads, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def rows(count: int) -> Tensor:
        return torch.randn(total, count, heads.dim, generator=generator) * 2

    return rows(heads.query), rows(heads.key), rows(heads.key)


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], heads: Heads) -> Tensor:
    attend = PackedAttention(
        np.array(lengths, dtype=np.int32), num_heads=heads.query, num_kv_heads=heads.key, device=CPU
    )
    return attend(0, q, k, v)[: len(q)]


def oracle(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], heads: Heads) -> Tensor:
    outs = []
    for one_q, one_k, one_v in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        repeat = heads.query // heads.key
        keys, values = (x.repeat_interleave(repeat, dim=1).transpose(0, 1) for x in (one_k, one_v))
        scores = one_q.transpose(0, 1) @ keys.transpose(1, 2) * heads.dim**-0.5
        unseen = torch.ones(scores.shape[1:]).triu(1).bool()
        outs.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)


class Paged:
    """Feeds sequences to a paged cache in steps that a test chooses, pages placed at random."""

    def __init__(self, lengths: list[int], heads: Heads, page_size: int, seed: int, poison: bool = False) -> None:
        self.lengths, self.heads, self.page_size = lengths, heads, page_size
        counts = [-(-n // page_size) for n in lengths]
        spare = 5
        order = np.random.default_rng(seed).permutation(sum(counts) + spare)
        self.tables, used = [], 0
        for count in counts:
            self.tables.append(order[used : used + count])
            used += count
        self.cache = KvCache(
            num_layers=1,
            num_pages=len(order),
            page_size=page_size,
            num_kv_heads=heads.key,
            head_dim=heads.dim,
            dtype=torch.float32,
            device=CPU,
        )
        if poison:
            self.cache.data[:, 0] = 1.0e36
            self.cache.data[:, 1] = 3.0e38
            for page in order[used:]:
                self.cache.data[:, :, :, page * page_size : (page + 1) * page_size] = torch.nan
        self.done = [0] * len(lengths)

    def step(self, chosen: dict[int, int], q: Tensor, k: Tensor, v: Tensor) -> dict[int, Tensor]:
        """`chosen`: sequence -> number of new tokens. Returns each one's new output rows."""
        firsts = np.cumsum([0, *self.lengths])
        names = list(chosen)
        rows, slots = [], []
        for name in names:
            span = np.arange(self.done[name], self.done[name] + chosen[name])
            rows.append(firsts[name] + span)
            slots.append(self.tables[name][span // self.page_size] * self.page_size + span % self.page_size)
        width = max(len(self.tables[name]) for name in names)
        attend = PagedAttention.chunks(
            self.cache,
            page_table=np.stack([np.pad(self.tables[name], (0, width - len(self.tables[name]))) for name in names]),
            starts=np.array([self.done[name] for name in names]),
            lengths=np.array([chosen[name] for name in names]),
            slots=np.concatenate(slots),
            num_heads=self.heads.query,
        )
        pick = torch.from_numpy(np.concatenate(rows))
        out = attend(0, q[pick], k[pick], v[pick])[: len(pick)]
        for name in names:
            self.done[name] += chosen[name]
        return dict(zip(names, out.split([chosen[name] for name in names]), strict=True))


def run_paged(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], heads: Heads, page_size: int, seed: int, poison: bool = False
) -> Tensor:
    """All sequences to their end, in random chunks and random company."""
    paged, rng = Paged(lengths, heads, page_size, seed, poison), np.random.default_rng(seed)
    outs: list[list[Tensor]] = [[] for _ in lengths]
    while any(done < n for done, n in zip(paged.done, lengths, strict=True)):
        waiting = [i for i, n in enumerate(lengths) if paged.done[i] < n]
        chosen = {}
        for name in rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)]:
            left = lengths[name] - paged.done[name]
            chosen[int(name)] = int(min(left, rng.choice([1, 1, 2, 7, 17, 64, 100])))
        for name, out in paged.step(chosen, q, k, v).items():
            outs[name].append(out)
    return torch.cat([torch.cat(parts) for parts in outs])


@settings(max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 90, 128, 150]), min_size=1, max_size=6),
    heads=st.sampled_from(HEADS),
    page_size=st.sampled_from([1, 16, 64, 128]),
    seed=st.integers(0, 10**6),
)
def test_paged_equals_packed(lengths: list[int], heads: Heads, page_size: int, seed: int) -> None:
    q, k, v = qkv(lengths, heads, seed)
    expected = packed(q, k, v, lengths, heads)
    actual = run_paged(q, k, v, lengths, heads, page_size, seed)
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("heads", HEADS)
def test_alone_equals_packed_in_any_order(heads: Heads) -> None:
    lengths = [40, 1, 200, 64, 129]
    q, k, v = qkv(lengths, heads)
    whole = packed(q, k, v, lengths, heads).split(lengths)
    for i, (one_q, one_k, one_v) in enumerate(zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)):
        assert torch.equal(packed(one_q, one_k, one_v, [lengths[i]], heads), whole[i])


@pytest.mark.parametrize("heads", HEADS)
def test_poisoned_pages_do_not_leak(heads: Heads) -> None:
    """NaN in pages of nobody, the largest finite numbers (of keys: products) in unused slots of pages in use."""
    lengths = [70, 3, 64]
    q, k, v = qkv(lengths, heads)
    expected = packed(q, k, v, lengths, heads)
    assert torch.equal(run_paged(q, k, v, lengths, heads, 16, 1, poison=True), expected)


@pytest.mark.parametrize("heads", HEADS)
def test_against_float64(heads: Heads) -> None:
    lengths = [5, 130, 1]
    leaves = [x.requires_grad_() for x in qkv(lengths, heads)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, expected = packed(*leaves, lengths, heads), oracle(*wide, lengths, heads)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    push = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * push).sum().backward()
    (expected * push.double()).sum().backward()
    for x, y in zip(leaves, wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_a_prefix_laid_once_gives_the_bits_of_whole_sequences(heads: Heads) -> None:
    """Three sequences go on from a prefix of 70 tokens, one from a prefix of 5, one stands alone."""
    prefixes, own = [70, 5], [3, 64, 1, 20, 33]
    parents = [-1, -1, 0, 0, 0, 1, -1]
    laid = [*prefixes, *own]
    leaves = [x.requires_grad_() for x in qkv(laid, heads)]
    attend = PackedAttention(
        np.array(laid, np.int32),
        num_heads=heads.query,
        num_kv_heads=heads.key,
        device=CPU,
        prefixes=np.array(parents, np.int32),
    )
    out = attend(0, *leaves)[: sum(laid)].split(laid)
    pieces = [x.split(laid) for x in leaves]
    for piece, parent in enumerate(parents):
        chain = [parent, piece] if parent >= 0 else [piece]
        q, k, v = (torch.cat([parts[i] for i in chain]) for parts in pieces)
        whole = packed(q, k, v, [len(q)], heads)[-laid[piece] :]
        assert torch.equal(out[piece].view(torch.int32), whole.view(torch.int32))
        grads = torch.autograd.grad(out[piece].square().sum(), leaves, retain_graph=True)
        expected = torch.autograd.grad(whole.square().sum(), leaves, retain_graph=True)
        for actual, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_row_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, lengths = HEADS[0], [100, 150]
    leaves = [x.requires_grad_() for x in qkv(lengths, heads)]
    out = packed(*leaves, lengths, heads)
    out.sum().backward()
    grads = [x.grad.clone() for x in leaves]
    monkeypatch.setattr("spmd_rl.kernels.attention.MAX_SCORES", 40_000)
    again = [x.detach().clone().requires_grad_() for x in leaves]
    sliced = packed(*again, lengths, heads)
    sliced.sum().backward()
    assert torch.equal(sliced, out)
    for x, grad in zip(again, grads, strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=1e-4, atol=1e-5)


def _mismatches(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> int:
    """Unequal bits when the paged side runs with another rule than the packed side."""
    heads, lengths = HEADS[0], [150, 33]
    q, k, v = qkv(lengths, heads)
    expected = packed(q, k, v, lengths, heads)
    monkeypatch.setattr(f"spmd_rl.kernels.attention.{name}", value)
    actual = run_paged(q, k, v, lengths, heads, 16, 2)
    return int((actual.view(torch.int32) != expected.view(torch.int32)).sum())


def test_control_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _mismatches(monkeypatch, "MAX_SCORES", 1 << 20) == 0


def test_control_other_blocks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _mismatches(monkeypatch, "KV_BLOCK", 32) > 0


def test_control_descending_blocks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def descending(weights: Tensor, v: Tensor, height: int) -> Tensor:
        blocks = range((weights.shape[-1] - 1) // 64 * 64, -1, -64)
        return torch.as_tensor(sum(weights[..., b : b + 64] @ v[..., b : b + 64, :] for b in blocks))

    assert _mismatches(monkeypatch, "_ascending_sums", descending) > 0


@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 100, 1000])
def test_softmax_is_that_of_the_keys_seen(width: int) -> None:
    """Its bits depend neither on how many unseen keys follow, in steps of the row tile, nor on the row's place."""
    scores = torch.randn(37, width, generator=torch.Generator().manual_seed(width)) * 3
    least = padded_rows(width)
    expected = F.pad(scores, (0, least - width), value=-torch.inf).softmax(-1)[:, :width]
    for padded in (least + 16, least + 48, 1024, 4096):
        actual = F.pad(scores, (0, padded - width), value=-torch.inf).softmax(-1)
        assert torch.equal(actual[:, :width], expected)
        assert not actual[:, width:].any()
    alone = F.pad(scores[5:6], (0, least - width), value=-torch.inf).softmax(-1)[:, :width]
    assert torch.equal(alone, expected[5:6])


def test_control_softmax_of_other_keys_differs() -> None:
    scores = torch.randn(37, 100, generator=torch.Generator().manual_seed(0)) * 3
    assert not torch.equal(scores.roll(1, dims=-1).softmax(-1).roll(-1, dims=-1), scores.softmax(-1))


def test_control_stale_key_fails() -> None:
    heads, lengths = HEADS[0], [80]
    q, k, v = qkv(lengths, heads)
    paged = Paged(lengths, heads, 16, 0)
    paged.step({0: 79}, q, k, v)
    paged.cache.data[0, 0, 0, paged.tables[0][0] * 16] += 1e-3
    last = paged.step({0: 1}, q, k, v)[0]
    assert not torch.equal(last[0], packed(q, k, v, lengths, heads)[-1])
