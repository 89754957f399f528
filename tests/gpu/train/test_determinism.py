"""The backward pass and the train step give the same bits again, where that was chosen; and where
not, they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import PackedAttention
from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.train.fsdp2.determinism import deterministic

DEVICE = torch.device("cuda")
LENGTHS = np.array([1, 300, 129, 1500, 64, 700, 1, 2048, 16, 511])
REPEATS = 12


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(64, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


@contextmanager
def company() -> Iterator[None]:
    """Another stream keeps part of the GPU busy, so that blocks are scheduled differently."""
    stream, one = torch.cuda.Stream(), torch.randn(1024, 1024, device=DEVICE)
    with torch.cuda.stream(stream):
        for _ in range(20):
            one = one @ one * 1e-3
    yield
    stream.synchronize()


def gradients(heads: int, kv_heads: int, dim: int, split: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    total = int(LENGTHS.sum())

    def rows(count: int) -> Tensor:
        return (
            torch.randn(total, count, dim, device=DEVICE, generator=generator)
            .bfloat16()
            .requires_grad_()
        )

    q, k, v = rows(heads), rows(kv_heads), rows(kv_heads)
    out = PackedAttention(LENGTHS, device=DEVICE, split=split)(0, q, k, v)
    slope = torch.randn(out.shape, device=DEVICE, generator=generator).bfloat16()
    with company():
        return list(torch.autograd.grad(out, (q, k, v), slope))


def num_different(*shape: int) -> int:
    """Repetitions in which any gradient differs from the first one's."""
    first = gradients(*shape)
    return sum(
        any(not torch.equal(a, b) for a, b in zip(first, gradients(*shape), strict=True))
        for _ in range(REPEATS)
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(16, 8, 128), (32, 8, 128), (14, 2, 64), (4, 4, 64), (8, 2, 32), (4, 2, 96)],
)
def test_attention_gives_the_same_gradients_again(heads: int, kv_heads: int, dim: int) -> None:
    with deterministic():
        assert num_different(heads, kv_heads, dim) == 0
        ordered = gradients(heads, kv_heads, dim)
    for ours, free in zip(ordered, gradients(heads, kv_heads, dim), strict=True):
        torch.testing.assert_close(ours, free, rtol=2e-2, atol=2e-2)


def test_attention_in_splits_does_too() -> None:
    with deterministic():
        assert num_different(16, 8, 128, 512) == 0


def test_control_without_the_setting_gradients_differ() -> None:
    assert num_different(32, 8, 128) > 0
