"""Heads of which a part is rotated: the rest stays as it is, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import QkNorm, Rotary, qk_norm_rope, rms_norm, rope, rope_table

EPS = 1e-6
TOKENS = 9


def table(size: int) -> tuple[Tensor, Tensor]:
    return rope_table(1.0 / 1e4 ** (torch.arange(0, size, 2) / size), 64)


@given(st.integers(1, 8), st.integers(0, 9), st.booleans(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_rest_of_a_head_stays(half: int, rest: int, normed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 2 * half
    q, k = (torch.randn(TOKENS, heads, size + rest, generator=generator) for heads in (3, 1))
    weights = (torch.rand(size + rest, generator=generator) + 0.5,) * 2 if normed else (None, None)
    cos, sin = table(size)
    at = torch.arange(TOKENS) * 7
    turned = qk_norm_rope(q, k, QkNorm(*weights, EPS), Rotary(at, cos, sin))
    for out, x, weight in zip(turned, (q, k), weights, strict=True):
        plain = x if weight is None else rms_norm(x, weight, EPS)
        assert torch.equal(out[..., size:], plain[..., size:])
        assert torch.equal(out[..., :size], rope(plain[..., :size], cos[at], sin[at]))


def test_gradients_turn_back() -> None:
    cos, sin = table(6)
    x = torch.randn(TOKENS, 2, 10, requires_grad=True)
    pull = torch.randn(TOKENS, 2, 10)
    (rope(x, cos[:TOKENS], sin[:TOKENS]) * pull).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[..., 6:], pull[..., 6:])
    back = rope(pull[..., :6].contiguous(), cos[:TOKENS], -sin[:TOKENS])
    assert torch.equal(x.grad[..., :6], back)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("size", [10, 16])
def test_the_kernel_does_the_same(size: int, normed: bool, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tests.unit.kernels.interpreted import Calls, results

    q, k = torch.randn(TOKENS, 3, 16), torch.randn(TOKENS, 2, 16)
    pulls = torch.randn(TOKENS, 3, 16), torch.randn(TOKENS, 2, 16)
    weights = (torch.rand(16) + 0.5, torch.rand(16) + 0.5) if normed else (None, None)
    rotary = torch.arange(TOKENS) * 5, *table(size)
    call = q, k, pulls, (*weights, EPS), rotary
    module = "tests.unit.kernels.rope_calls"
    ((*found,),) = results(Calls(module, "both_ways", {}, [call]), tmp_path)
    leaves = [one.clone().requires_grad_() for one in (q, k, *(weights if normed else ()))]
    norm = QkNorm(*(leaves[2:] if normed else weights), EPS)
    turned = qk_norm_rope(*leaves[:2], norm, Rotary(*rotary))
    torch.autograd.backward(turned, pulls)
    expected = [*turned, *(one.grad for one in leaves)]
    for one, other in zip([one for one in found if one is not None], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
