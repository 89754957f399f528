"""Recomputed outputs give the same gradients, and each recipe runs once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from spmd_rl.kernels import (
    QkNorm,
    Rotary,
    add_rms_norm,
    linear,
    qk_norm_rope,
    recomputing,
    rope_table,
    silu_mul,
)
from spmd_rl.kernels.runtime import recompute

WIDTH, TOKENS = 64, 48


def _layer(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    """Run every recomputable op before one that keeps its output; three keep the norm's output."""
    normed, residual = add_rms_norm(x, residual, norm, 1e-6)
    q, k, v = (linear(normed, one).unflatten(1, (2, WIDTH // 2)) for one in weight[:3])
    table = rope_table(torch.linspace(0.1, 1, WIDTH // 4), TOKENS)
    qk_norm = QkNorm(norm[: WIDTH // 2], norm[WIDTH // 2 :], 1e-6)
    q, k = qk_norm_rope(q, k, qk_norm, Rotary(torch.arange(TOKENS), *table))
    mixed = linear((q * k + v).flatten(1), weight[3])
    return linear(silu_mul(mixed, linear(residual, weight[4])), weight[5]) + residual


def _results(context: AbstractContextManager[None]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, WIDTH), (TOKENS, WIDTH), (6, WIDTH, WIDTH), (WIDTH,)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    with context:
        out = _layer(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("context", "dropped"), [(recomputing, True), (nullcontext, False)])
def test_what_is_made_again_is_not_kept(context: type[nullcontext[None]], dropped: bool) -> None:
    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
    with context():
        act = silu_mul(linear(x, weight), linear(x, weight))
        out = linear(act, weight)
    storage = StorageWeakRef(act.untyped_storage())
    del act
    assert storage.expired() == dropped
    out.sum().backward()


class _Counting(recompute._Recomputation):
    followed = 0
    spoil = 0.0

    def __init__(self, recipe: recompute.Recipe) -> None:
        super().__init__(lambda: self._follow(recipe))

    def _follow(self, recipe: recompute.Recipe) -> list[Tensor]:
        type(self).followed += 1
        return [one + self.spoil for one in recipe()]


def test_gradients_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_Recomputation", _Counting)
    monkeypatch.setattr(_Counting, "followed", 0)
    results = zip(_results(nullcontext()), _results(recomputing()), strict=True)
    assert all(torch.equal(one, other) for one, other in results)
    assert _Counting.followed == 2


def test_control_a_wrong_recipe_shows_in_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_Recomputation", _Counting)
    monkeypatch.setattr(_Counting, "spoil", 1e-3)
    same = [
        torch.equal(one, other)
        for one, other in zip(_results(nullcontext()), _results(recomputing()), strict=True)
    ]
    assert same[0]
    assert not all(same)
