"""Attention without FlashAttention-4 on a GPU: right, with the same bits packed and paged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from spmd_rl.kernels.attention import blocked_triton
from spmd_rl.kernels.attention.blocked_triton import BlockTile
from spmd_rl.kernels.runtime.padding import padded_rows
from tests.gpu.kernels.gradients import gradient
from tests.gpu.kernels.paged_case import Paged, each, padded, qkv, sequences
from tests.unit.kernels.paged_case import Data, Heads, oracle, packed

LENGTHS = [1, 5, 16, 17, 40, 130]
NUM_TOKENS = sum(LENGTHS)
HEADS = [
    Heads(8, 2, 64),
    Heads(7, 1, 64),
    Heads(6, 2, 128),
    Heads(4, 4, 128),
    Heads(6, 3, 80),
    Heads(8, 1, 256),
]
LONG = [1, 16, 63, 64, 65, 300, 1500, 127, 128, 129]
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # of the distance, relative
WAYS = ("packed", "chunks", "decoding")
TILE = blocked_triton.block_tile
Unequal = Callable[[Tensor, Tensor], int]
UNWRITTEN = 7.0  # what the cache holds before: nobody may see it


@pytest.fixture(autouse=True)
def _without_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_rl.kernels.attention.backend.flash_supports", lambda *_: False)


def attend(way: str, data: Data, heads: Heads, page_size: int = 16) -> Tensor:
    if way == "packed":
        return packed(*data, LENGTHS, heads)[:NUM_TOKENS]
    paged = Paged(LENGTHS, heads, page_size, dtype=data[0].dtype)
    assert not paged.cache.backend.fits_cuda_graphs(page_size, 1)
    paged.cache.data.fill_(UNWRITTEN)
    return paged.decoding(data, 6) if way == "decoding" else paged.chunks(data, [1, 2, 7, 33, 64])


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().cpu().double() - expected).norm() / expected.norm())


def wide(data: Data) -> Data:
    return each(data, lambda x: x.detach().cpu().double())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("way", ["chunks", "decoding"])
@pytest.mark.parametrize("heads", HEADS)
def test_pages_against_float64(heads: Heads, way: str, page_size: int, dtype: torch.dtype) -> None:
    data = qkv(NUM_TOKENS, heads, dtype=dtype)
    assert (
        distance(attend(way, data, heads, page_size), oracle(*wide(data), LENGTHS, heads))
        < LIMITS[dtype]
    )


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("heads", HEADS)
def test_packed_and_its_gradients_against_float64(heads: Heads, dtype: torch.dtype) -> None:
    """Rows of padding get no gradient."""
    leaves = each(qkv(padded_rows(NUM_TOKENS), heads, dtype=dtype), Tensor.requires_grad_)
    exact = each(wide(leaves), Tensor.requires_grad_)
    out = packed(*leaves, LENGTHS, heads)[:NUM_TOKENS]
    expected = oracle(*each(exact, lambda x: x[:NUM_TOKENS]), LENGTHS, heads)
    push = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    out.backward(push.to(out))
    expected.backward(push)
    assert distance(out, expected.detach()) < LIMITS[dtype]
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert distance(gradient(leaf), gradient(wanted)) < 2 * LIMITS[dtype]
        assert torch.count_nonzero(gradient(leaf)[NUM_TOKENS:]) == 0


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("heads", HEADS)
def test_chunks_equal_packed(
    heads: Heads, dtype: torch.dtype, page_size: int, poison: bool, unequal: Unequal
) -> None:
    data = qkv(sum(LONG), heads, dtype=dtype)
    chunks = Paged(LONG, heads, page_size, poison, dtype=dtype).chunks(
        data, [1, 2, 17, 64, 100, 512]
    )
    assert unequal(chunks, packed(*data, LONG, heads)) == 0


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("heads", HEADS)
def test_decoding_equals_packed(heads: Heads, dtype: torch.dtype, unequal: Unequal) -> None:
    data = qkv(sum(LONG), heads, dtype=dtype)
    decoded = Paged(LONG, heads, 16, dtype=dtype).decoding(data, 20)
    assert unequal(decoded, packed(*data, LONG, heads)) == 0


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("heads", HEADS)
def test_alone_and_padded_equal_packed(heads: Heads, dtype: torch.dtype, unequal: Unequal) -> None:
    data = qkv(sum(LONG), heads, dtype=dtype)
    whole = packed(*data, LONG, heads).split(LONG)
    for length, alone, part in zip(LONG, whole, sequences(data, LONG), strict=True):
        assert unequal(packed(*part, [length], heads), alone) == 0
        assert unequal(packed(*padded(part), [length], heads)[:length], alone) == 0


def test_more_sequences_than_a_grid_is_high(unequal: Unequal) -> None:
    """A token alone attends to its own value, with a program for each key-value head."""
    heads, lengths = Heads(8, 8, 64), [1] * 9000
    q, k, v = qkv(len(lengths), heads)
    assert len(lengths) * heads.key > 65535
    assert unequal(packed(q, k, v, lengths, heads)[: len(lengths)], v) == 0


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_zero_has_the_sign_it_has_alone(dtype: torch.dtype, unequal: Unequal) -> None:
    """Weights of the first, negative values underflow; all other values are -0 or not read."""
    heads, seen = Heads(1, 1, 64), 100
    q, k, v = (torch.zeros(seen + 60, 1, heads.dim, dtype=dtype, device="cuda") for _ in range(3))
    q[:], k[:64], v[:64], v[64:] = 64.0, -64.0, -1.0, -0.0
    alone = packed(q[:seen], k[:seen], v[:seen], [seen], heads)
    assert torch.count_nonzero(alone[64:]) == 0
    assert unequal(packed(q, k, v, [len(q)], heads)[:seen], alone) == 0


def narrower(dtype: torch.dtype, dim: int) -> BlockTile:
    return TILE(dtype, dim)._replace(keys=TILE(dtype, dim).keys // 2)


def library(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, num_used: int, scale: float
) -> Tensor:
    seen = torch.arange(k.shape[2], device=k.device) < visible.unsqueeze(-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


@pytest.mark.parametrize(
    ("name", "other"), [("block_tile", narrower), ("attend_in_blocks", library)]
)
@pytest.mark.parametrize("dtype", LIMITS)
def test_control_another_order_of_sums_fails(
    dtype: torch.dtype,
    name: str,
    other: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    unequal: Unequal,
) -> None:
    heads = HEADS[0]
    data = qkv(sum(LONG), heads, dtype=dtype)
    decoded = Paged(LONG, heads, 16, dtype=dtype).decoding(data, 20)
    monkeypatch.setattr(blocked_triton, name, other)
    assert unequal(decoded, packed(*data, LONG, heads)) > 0


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("way", WAYS)
def test_control_a_key_too_many_or_too_few_is_seen(
    way: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, attend_in_blocks = HEADS[0], blocked_triton.attend_in_blocks

    def shifted(
        q: Tensor, k: Tensor, v: Tensor, visible: Tensor, num_used: int, scale: float
    ) -> Tensor:
        return attend_in_blocks(
            q, k, v, (visible + more).clamp(min=1, max=k.shape[2]), num_used, scale
        )

    data = qkv(NUM_TOKENS, heads)
    expected = oracle(*wide(data), LENGTHS, heads)
    assert distance(attend(way, data, heads), expected) < LIMITS[torch.bfloat16]
    monkeypatch.setattr(blocked_triton, "attend_in_blocks", shifted)
    assert distance(attend(way, data, heads), expected) > 3 * LIMITS[torch.bfloat16]
