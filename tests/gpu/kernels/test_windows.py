"""Attention in windows and with sinks: float64's numbers, and equal bits in pages and packs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.kernels.attention.token_attention import Reach
from tests.unit.kernels.paged_case import Data, Heads, Paged, packed, qkv
from tests.unit.kernels.test_reach import oracle, reach_of

DEVICE = torch.device("cuda")
LENGTHS = [1, 16, 127, 128, 129, 700, 255, 256, 257, 1, 383, 1500]
CASES = [
    (Heads(64, 8, 64), 128, True),  # as gpt-oss has them
    (Heads(64, 8, 64), 0, True),
    (Heads(14, 2, 64), 100, False),
    (Heads(16, 8, 128), 1000, True),
    (Heads(4, 4, 96), 1, True),
]


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(128, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Heads, Reach]:
    heads, window, has_sinks = request.param
    reach = reach_of(heads, window, has_sinks)
    sinks = None if reach.sinks is None else reach.sinks.to(DEVICE, torch.bfloat16)
    return heads, Reach(window, sinks)


def rows(heads: Heads, lengths: list[int]) -> Data:
    return qkv(sum(lengths), heads, dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_chunks_equal_packed(case: tuple[Heads, Reach], page_size: int, unequal) -> None:
    heads, reach = case
    data = rows(heads, LENGTHS)
    paged = Paged(LENGTHS, heads, page_size, reach=reach, dtype=torch.bfloat16, device=DEVICE)
    chunks = paged.chunks(data, [1, 2, 17, 64, 100, 128, 512])
    assert unequal(chunks, packed(*data, LENGTHS, heads, reach=reach)) == 0


@pytest.mark.parametrize("page_size", [16, 128])
def test_decode_equals_packed(case: tuple[Heads, Reach], page_size: int, unequal) -> None:
    heads, reach = case
    lengths = [130, 3, 257, 128, 64, 40]
    data = rows(heads, lengths)
    paged = Paged(lengths, heads, page_size, reach=reach, dtype=torch.bfloat16, device=DEVICE)
    decoded = paged.decoding(data, 20)
    assert unequal(decoded, packed(*data, lengths, heads, reach=reach)) == 0


def test_numbers_and_gradients_are_close_to_float64(case: tuple[Heads, Reach]) -> None:
    heads, reach = case
    lengths = [150, 1, 70, 400]
    data = rows(heads, lengths)
    leaves = [one.requires_grad_() for one in data]
    if reach.sinks is not None:
        leaves.append(reach.sinks.requires_grad_())
    pull = torch.randn(sum(lengths), heads.query, heads.dim, device=DEVICE).bfloat16()
    out = packed(*data, lengths, heads, reach=reach)[: sum(lengths)]
    ours = torch.autograd.grad(out, leaves, pull)
    exact = [one.detach().double().cpu().requires_grad_() for one in leaves]
    sinks = exact[3] if len(exact) > 3 else None
    theirs = oracle((exact[0], exact[1], exact[2]), lengths, heads, Reach(reach.window, sinks))
    expected = torch.autograd.grad(theirs, exact, pull.double().cpu())
    assert error(out, theirs) <= 1e-2
    for one, other in zip(ours, expected, strict=True):
        assert error(one, other) <= 2e-2


def error(x: Tensor, expected: Tensor) -> float:
    return float((x.double().cpu() - expected).norm() / expected.norm())
