"""Attention in windows and with sinks: equal bits in pages and packed; float64's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.kernels.attention import blocked
from spmd_rl.kernels.attention.token_attention import Reach, attend
from spmd_rl.kernels.runtime.padding import padded_rows
from tests.unit.kernels.paged_case import Data, Heads, Paged, packed, qkv

CPU = torch.device("cpu")
HEADS = [Heads(4, 2, 16), Heads(7, 1, 8), Heads(3, 3, 10)]
LENGTHS = st.lists(st.sampled_from([1, 15, 64, 65, 90, 150, 300]), min_size=1, max_size=5)
WINDOWS = st.sampled_from([0, 1, 13, 64, 100, 1000])
SIZES = [1, 1, 2, 17, 64, 100]  # of chunks


def reach_of(heads: Heads, window: int, has_sinks: bool) -> Reach:
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(heads.query, generator=generator) * 3 if has_sinks else None
    return Reach(window, sinks)


def oracle(data: Data, lengths: list[int], heads: Heads, reach: Reach) -> Tensor:
    """In plain torch, with a column more for the sink."""
    outs = []
    for q, k, v in zip(*(x.split(lengths) for x in data), strict=True):
        groups = heads.query // heads.key
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * heads.dim**-0.5
        ones = torch.ones(scores.shape[1:])
        unseen = ones.triu(1).bool()
        if reach.window:
            unseen |= ones.tril(-reach.window).bool()
        scores = scores.masked_fill(unseen, -torch.inf)
        if reach.sinks is not None:
            sinks = reach.sinks.to(q.dtype).view(-1, 1, 1).expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sinks], -1)
        outs.append((scores.softmax(-1)[..., : len(k)] @ values).transpose(0, 1))
    return torch.cat(outs)


@settings(max_examples=40)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from(HEADS),
    page_size=st.sampled_from([1, 16, 64]),
    window=WINDOWS,
    has_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slices=st.booleans(),
)
def test_pages_and_packs_have_equal_bits(
    lengths: list[int],
    heads: Heads,
    page_size: int,
    window: int,
    has_sinks: bool,
    dtype: torch.dtype,
    slices: bool,
) -> None:
    data = qkv(sum(lengths), heads, dtype=dtype, device=CPU)
    reach = reach_of(heads, window, has_sinks)
    paged = Paged(lengths, heads, page_size, reach=reach, dtype=dtype, device=CPU)
    actual = paged.chunks(data, SIZES)
    with pytest.MonkeyPatch.context() as patch:
        if slices:
            patch.setattr(blocked, "MAX_SCORES", 1)
        expected = packed(*data, lengths, heads, reach=reach)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("slices", [False, True])
def test_numbers_and_gradients_are_those_of_float64(
    window: int, slices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slices:
        monkeypatch.setattr(blocked, "MAX_SCORES", 1)
    heads, lengths = HEADS[0], [150, 1, 70]
    data = qkv(sum(lengths), heads, dtype=torch.float32, device=CPU)
    reach = reach_of(heads, window, True)
    pull = torch.randn(sum(lengths), heads.query, heads.dim)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [one.detach().to(dtype).requires_grad_() for one in (*data, reach.sinks)]
        *rows, sinks = leaves
        of = Reach(window, sinks)
        if dtype == torch.float32:
            out = packed(*rows, lengths, heads, reach=of)
        else:
            out = oracle(tuple(rows), lengths, heads, of)
        (out * pull).sum().backward()
        found.append([out, *(one.grad for one in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("window", [16, 100])
def test_a_prefix_laid_once_gives_the_bits_of_whole_sequences(window: int) -> None:
    heads, prefix, ends = HEADS[0], 90, [70, 5]
    reach = reach_of(heads, window, True)
    data = qkv(prefix + sum(ends), heads, dtype=torch.float32, device=CPU)
    attention = PackedAttention(
        np.array([prefix, *ends]), device=CPU, prefixes=np.array([-1, 0, 0], dtype=np.int32)
    )
    shared = attention(0, *data, reach=reach)
    begin = prefix
    for count in ends:
        rows = torch.cat([torch.arange(prefix), torch.arange(begin, begin + count)])
        whole = packed(*(one[rows] for one in data), [len(rows)], heads, reach=reach)
        assert torch.equal(whole, shared[rows])
        begin += count


@pytest.mark.parametrize("hidden", [64, 128, 640])
def test_softmax_is_that_of_the_keys_in_a_window(hidden: int) -> None:
    """Unseen keys before others, in whole blocks, change no bit."""
    scores = torch.randn(37, 100, generator=torch.Generator().manual_seed(0)) * 3
    scores = F.pad(scores, (0, padded_rows(100) - 100), value=-torch.inf)
    wide = F.pad(scores, (hidden, 0), value=-torch.inf).softmax(-1)
    assert torch.equal(wide[:, hidden:], scores.softmax(-1))


def test_no_key_before_a_window_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk late in a sequence takes the blocks of its window, and not those before."""
    heads, lengths = HEADS[0], [900]
    data = qkv(900, heads, dtype=torch.float32, device=CPU)
    paged = Paged(lengths, heads, 16, reach=Reach(30), dtype=torch.float32, device=CPU)
    paged.step({0: 890}, *data)
    widths, inner = [], blocked._weights

    def noted(q: Tensor, k: Tensor, *given: object) -> object:
        widths.append(k.shape[2])
        return inner(q, k, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(blocked, "_weights", noted)
    paged.step({0: 1}, *data)
    assert widths == [padded_rows(891) - 832]


def test_kernels_of_gpus_refuse_what_they_do_not_know() -> None:
    q = torch.empty(1, 4, 16, device="meta")
    with pytest.raises(ConfigError, match="no GPU has run"):
        attend(lambda *given: q, q, q, q, Reach(window=128))
