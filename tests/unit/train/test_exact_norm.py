"""The norm of gradients in whole numbers: the same bits for any shards, in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.train.fsdp2 import exact_norm
from spmd_rl.train.fsdp2.exact_norm import exact_square_norm

pytestmark = pytest.mark.usefixtures("context")


@given(
    st.integers(1, 5000), st.floats(-15, 15), st.floats(0, 12), st.integers(1, 40), st.integers(0)
)
@settings(max_examples=50, deadline=None)
def test_it_depends_on_no_order_and_no_shards(
    count: int, size: float, spread: float, num_shards: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    scales = torch.logspace(size - spread, size, count, dtype=torch.float64)
    gradient = (torch.randn(count, generator=generator).double() * scales).float()
    whole = exact_square_norm([gradient], count, dist.group.WORLD)
    turned = gradient[torch.randperm(count, generator=generator)]
    shards = list(turned.tensor_split(num_shards))
    assert exact_square_norm(shards, count, dist.group.WORLD) == whole
    exact = math.fsum(np.square(gradient.double().numpy()).tolist())
    assert whole == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("num_elements", [1 << 30, 1 << 36])
def test_each_digit_counts(num_elements: int) -> None:
    """Of a model with so many elements, a digit has few bits: all three have more than 45."""
    gradient = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    exact = math.fsum(np.square(gradient.double().numpy()).tolist())
    found = exact_square_norm([gradient], num_elements, dist.group.WORLD)
    assert found == pytest.approx(exact, rel=2.0**-40)


def test_sums_in_float_depend_on_the_order() -> None:
    """A negative control."""
    gradient = torch.randn(4000) * torch.logspace(-6, 0, 4000)
    sums = {sum(gradient.square()[torch.randperm(4000)].tolist()) for _ in range(9)}
    assert len(sums) > 1


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(size) for size in (700, 1, 0, 64)]
    whole = exact_square_norm(gradients, 765, dist.group.WORLD)
    monkeypatch.setattr(exact_norm, "CHUNK_ELEMENTS", 50)
    assert exact_square_norm(gradients, 765, dist.group.WORLD) == whole


def test_what_is_zero_or_not_finite() -> None:
    assert exact_square_norm([], 9, dist.group.WORLD) == 0.0
    assert exact_square_norm([torch.zeros(3)], 3, dist.group.WORLD) == 0.0
    for value in (math.nan, math.inf, -math.inf):
        gradients = [torch.tensor([1.0, value])]
        assert exact_square_norm(gradients, 2, dist.group.WORLD) is None
