"""Packed training attention and paged decoding have the same bits; both agree with float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import PackedAttention
from spmd_rl.kernels.attention import blocked, blocked_batches
from spmd_rl.kernels.attention.blocked import blocked_attention, library_gradients
from spmd_rl.kernels.attention.row_layout import QUERY_TILE, RowLayout
from spmd_rl.kernels.runtime.padding import padded_rows
from tests.unit.kernels import paged_case
from tests.unit.kernels.paged_case import Data, Heads, Paged, oracle, packed

CPU = torch.device("cpu")


HEADS = [
    Heads(4, 2, 16),
    Heads(4, 4, 32),
    Heads(7, 1, 8),
    Heads(6, 2, 64),
    Heads(6, 2, 6),
    Heads(3, 3, 10),
    Heads(5, 1, 2),
]


SIZES = [1, 1, 2, 7, 17, 64, 100]  # of chunks


def qkv(lengths: list[int], heads: Heads, seed: int = 0) -> Data:
    return paged_case.qkv(sum(lengths), heads, seed, dtype=torch.float32, device=CPU)


def new_paged(
    lengths: list[int], heads: Heads, page_size: int, seed: int, poison: bool = False
) -> Paged:
    return Paged(lengths, heads, page_size, poison, seed=seed, dtype=torch.float32, device=CPU)


@settings(max_examples=25)
@given(
    lengths=st.lists(
        st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 90, 128, 150]), min_size=1, max_size=6
    ),
    heads=st.sampled_from(HEADS),
    page_size=st.sampled_from([1, 16, 64, 128]),
    seed=st.integers(0, 10**6),
)
def test_paged_equals_packed(lengths: list[int], heads: Heads, page_size: int, seed: int) -> None:
    data = qkv(lengths, heads, seed)
    expected = packed(*data, lengths, heads)
    actual = new_paged(lengths, heads, page_size, seed).chunks(data, SIZES)
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def test_bfloat16_where_its_products_do_not_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs with AMX: the sums of a product of bfloat16 depend on its height and width."""
    plain, lengths, heads = torch.bmm, [70, 33, 5], Heads(4, 2, 32)

    def by_shape(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return plain(x, y)
        part = 1 + (x.shape[1] + y.shape[2]) % (x.shape[2] - 1)
        return plain(x[..., :part], y[:, :part]) + plain(x[..., part:], y[:, part:])

    monkeypatch.setattr(torch, "bmm", by_shape)
    data = paged_case.qkv(sum(lengths), heads, dtype=torch.bfloat16, device=CPU)

    def unequal() -> int:
        paged = Paged(lengths, heads, 16, dtype=torch.bfloat16, device=CPU).chunks(data, SIZES)
        return int((paged != packed(*data, lengths, heads)[: len(paged)]).sum())

    assert unequal() == 0
    near = oracle(*(x.double() for x in data), lengths, heads)
    torch.testing.assert_close(
        packed(*data, lengths, heads)[: len(near)].double(), near, rtol=5e-3, atol=5e-3
    )
    monkeypatch.setattr(torch, "promote_types", lambda dtype, _: dtype)
    assert unequal() > 0, "the control"


@pytest.mark.parametrize("heads", HEADS)
def test_laid_out_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, heads: Heads) -> None:
    """Batches are chosen as on a GPU, by rows and keys: many of them instead of two."""
    number_on, numbers = blocked_batches.batch_numbers, set()

    def on_gpu(
        rows: NDArray[np.int64], keys: NDArray[np.int64], device: torch.device
    ) -> NDArray[np.int64]:
        parts = number_on(rows, keys, torch.device("cuda"))
        for part in np.unique(parts):
            same = keys[parts == part]
            assert same.max() < 2 * max(same.min(), QUERY_TILE)
        numbers.add(len(np.unique(parts)))
        return parts

    monkeypatch.setattr(blocked_batches, "batch_numbers", on_gpu)
    lengths = [1, 5, 16, 40, 150, 130, 64]
    data = qkv(lengths, heads)
    assert torch.equal(
        new_paged(lengths, heads, 16, 3).chunks(data, SIZES), packed(*data, lengths, heads)
    )
    assert max(numbers) > 2


@pytest.mark.parametrize("heads", HEADS)
def test_alone_equals_packed_in_any_order(heads: Heads) -> None:
    lengths = [40, 1, 200, 64, 129]
    q, k, v = qkv(lengths, heads)
    whole = packed(q, k, v, lengths, heads).split(lengths)
    for i, (one_q, one_k, one_v) in enumerate(
        zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ):
        assert torch.equal(packed(one_q, one_k, one_v, [lengths[i]], heads), whole[i])


@pytest.mark.parametrize("heads", HEADS)
def test_poisoned_pages_do_not_leak(heads: Heads) -> None:
    """Free pages hold NaN, and unused slots the largest numbers whose products are finite."""
    lengths = [70, 3, 64]
    data = qkv(lengths, heads)
    expected = packed(*data, lengths, heads)
    assert torch.equal(new_paged(lengths, heads, 16, 1, poison=True).chunks(data, SIZES), expected)


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
    """Three sequences continue a prefix of 70 tokens, one a prefix of 5, and one stands alone."""
    prefixes, own = [70, 5], [3, 64, 1, 20, 33]
    parents = [-1, -1, 0, 0, 0, 1, -1]
    laid = [*prefixes, *own]
    leaves = [x.requires_grad_() for x in qkv(laid, heads)]
    attend = PackedAttention(
        np.array(laid, np.int32),
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


@pytest.mark.parametrize("starts", [[0, 0, 0], [20, 0, 3]])
@pytest.mark.parametrize("heads", HEADS)
def test_gradients_of_the_library(heads: Heads, starts: list[int]) -> None:
    """A GPU takes these gradients where only the forward pass is our own."""
    lengths, groups = np.array([5, 130, 1]), heads.query // heads.key
    first = np.cumsum(lengths) - lengths
    layout = RowLayout.build(first, np.array(starts), lengths, groups, CPU)
    assert layout.is_causal == (not any(starts))
    q = layout.rows(qkv(lengths.tolist(), heads)[0], heads.key)
    shape = heads.key, len(lengths), padded_rows(int((lengths + starts).max())), heads.dim
    generator = torch.Generator().manual_seed(0)
    leaves = [
        x.double().requires_grad_() for x in (q, *torch.randn(2, *shape, generator=generator))
    ]
    tokens = layout.tokens(blocked_attention(*leaves, layout, 0.3))[: lengths.sum()]
    push = torch.randn(tokens.shape, generator=generator).double()
    tokens.backward(push)
    rows = torch.zeros_like(leaves[0], requires_grad=True)
    of_rows = torch.autograd.grad(layout.tokens(rows)[: lengths.sum()], rows, push)[0]
    found = library_gradients(*leaves, layout, 0.3, of_rows)
    for actual, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(actual, leaf.grad)


def test_row_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, lengths = HEADS[0], [100, 150]
    leaves = [x.requires_grad_() for x in qkv(lengths, heads)]
    out = packed(*leaves, lengths, heads)
    out.sum().backward()
    grads = [x.grad.clone() for x in leaves]
    monkeypatch.setattr("spmd_rl.kernels.attention.blocked.MAX_SCORES", 40_000)
    again = [x.detach().clone().requires_grad_() for x in leaves]
    sliced = packed(*again, lengths, heads)
    sliced.sum().backward()
    assert torch.equal(sliced, out)
    for x, grad in zip(again, grads, strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_scores", [1, 3000, 20_000])
@pytest.mark.parametrize("heads", [Heads(7, 1, 8), Heads(10, 2, 8), Heads(12, 4, 8)])
def test_slices_end_where_rows_are_padding(
    monkeypatch: pytest.MonkeyPatch, heads: Heads, max_scores: int
) -> None:
    """A sequence's padding to whole tiles of rows and heads can be more than one slice of rows."""
    lengths = [9] * 5
    leaves = [x.requires_grad_() for x in qkv(lengths, heads)]
    out = packed(*leaves, lengths, heads)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    monkeypatch.setattr("spmd_rl.kernels.attention.blocked.MAX_SCORES", max_scores)
    sliced = packed(*leaves, lengths, heads)
    assert torch.equal(sliced, out)
    for found, expected in zip(
        torch.autograd.grad(sliced.square().sum(), leaves), grads, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    one = new_paged([9, 9], heads, 16, 1).chunks(tuple(x[:18].detach() for x in leaves), [1])
    assert torch.equal(one, out[:18])


def _mismatches(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> int:
    """Count unequal bits when the paged side runs with another rule than the packed side."""
    heads, lengths = HEADS[0], [150, 33]
    data = qkv(lengths, heads)
    expected = packed(*data, lengths, heads)
    monkeypatch.setattr(f"spmd_rl.kernels.attention.blocked.{name}", value)
    actual = new_paged(lengths, heads, 16, 2).chunks(data, SIZES)
    return int((actual.view(torch.int32) != expected.view(torch.int32)).sum())


def test_control_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _mismatches(monkeypatch, "MAX_SCORES", 1 << 20) == 0


def test_control_other_blocks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _mismatches(monkeypatch, "KV_BLOCK", 32) > 0


def test_control_descending_blocks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def descending(weights: Tensor, v: Tensor, height: int) -> Tensor:
        blocks = range((weights.shape[-1] - 1) // 64 * 64, -1, -64)
        return torch.as_tensor(
            sum(weights[..., b : b + 64] @ v[..., b : b + 64, :] for b in blocks)
        )

    assert _mismatches(monkeypatch, "_ascending_sums", descending) > 0


@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 100, 1000])
def test_softmax_is_that_of_the_keys_seen(width: int) -> None:
    """Neither the number of unseen keys, in whole tiles, nor the row's position changes bits."""
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
    assert not torch.equal(
        scores.roll(1, dims=-1).softmax(-1).roll(-1, dims=-1), scores.softmax(-1)
    )


def test_control_stale_key_fails() -> None:
    heads, lengths = HEADS[0], [80]
    data = qkv(lengths, heads)
    paged = new_paged(lengths, heads, 16, 0)
    paged.step({0: 79}, *data)
    paged.cache.data[0, 0, 0, paged.tables[0][0] * 16] += 1e-3
    rows, last = paged.step({0: 1}, *data)
    assert not torch.equal(last, packed(*data, lengths, heads)[rows])


def test_control_a_library_that_counts_places_for_heads_of_no_multiple_of_four(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, lengths, plain = Heads(3, 3, 10), [40, 3, 64], torch.bmm
    data = qkv(lengths, heads)

    def by_place(x: Tensor, y: Tensor) -> Tensor:
        out = plain(x, y)
        if x.shape[2] % 4 or y.shape[2] % 4:
            out[:, 1::2] = plain(x.flip(2), y.flip(1))[:, 1::2]
        return out

    monkeypatch.setattr(torch, "bmm", by_place)
    for pad, same in ((blocked.pad_columns, True), (lambda x: x, False)):
        monkeypatch.setattr(blocked, "pad_columns", pad)
        paged = new_paged(lengths, heads, 16, 1).chunks(data, SIZES)
        assert torch.equal(paged, packed(*data, lengths, heads)) is same
