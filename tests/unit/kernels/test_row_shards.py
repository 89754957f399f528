"""Row-parallel products: one tree of sums, however many ranks have the parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import linear
from spmd_rl.kernels.linear.row_shards import ColumnParallel, RowParallel
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS
from spmd_rl.model.held.held import VOCAB_SHARDS
from tests.shared_ranks import Meeting, ThreadExchange, on_ranks


def drawn(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@settings(max_examples=25, deadline=None)
@given(
    shards=st.sampled_from([2, 4, 8]),
    log_ranks=st.integers(1, 3),
    rows=st.integers(1, 40),
    columns=st.integers(1, 30),
    unit=st.integers(1, 9),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_ranks_have_the_bits_of_one(
    shards: int,
    log_ranks: int,
    rows: int,
    columns: int,
    unit: int,
    has_bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    num_ranks = min(2**log_ranks, shards)
    k = unit * shards
    x, weight, bias = drawn(seed, (rows, k), (columns, k), (columns,), dtype=dtype)
    own_bias = bias if has_bias else None
    whole = RowParallel(shards)(x, weight, own_bias)
    meeting = Meeting(num_ranks)

    def of_rank(rank: int) -> Tensor:
        product = RowParallel(shards // num_ranks, ThreadExchange(meeting, rank))
        own = (one.chunk(num_ranks, 1)[rank].contiguous() for one in (x, weight))
        return product(*own, own_bias)

    for one in on_ranks(of_rank, num_ranks):
        assert torch.equal(one, whole)
    exact = F.linear(x.double(), weight.double(), None if own_bias is None else bias.double())
    torch.testing.assert_close(whole, exact.to(dtype))


@settings(max_examples=25, deadline=None)
@given(
    shards=st.sampled_from([2, 4, 8]),
    log_ranks=st.integers(1, 3),
    rows=st.integers(1, 40),
    unit=st.integers(1, 9),
    k=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_columns_of_ranks_have_the_bits_of_one(
    shards: int, log_ranks: int, rows: int, unit: int, k: int, seed: int
) -> None:
    num_ranks = min(2**log_ranks, shards)
    x, weight, bias = drawn(seed, (rows, k), (unit * shards, k), (unit * shards,))
    whole = ColumnParallel(shards)(x, weight, bias)
    own = ColumnParallel(shards // num_ranks)
    pairs = zip(weight.chunk(num_ranks), bias.chunk(num_ranks), strict=True)
    found = [own(x, part.contiguous(), one) for part, one in pairs]
    assert torch.equal(torch.cat(found, 1), whole)
    torch.testing.assert_close(whole, F.linear(x, weight, bias))


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_parts_are_added_as_a_tree(shards: int) -> None:
    """Each part is one number, so that numpy's float32 gives every sum that is rounded."""
    rng = np.random.default_rng(shards)
    for _ in range(50):
        numbers = (rng.standard_normal(shards) * 10.0 ** rng.integers(-4, 4, shards)).astype("f4")
        parts = list(numbers)
        while len(parts) > 1:
            parts = [np.float32(a + b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        x = torch.zeros(1, 4 * shards)
        x[0, ::4] = torch.from_numpy(numbers)
        found = RowParallel(shards)(x, torch.ones(1, 4 * shards), torch.tensor([0.75]))
        assert found.item() == np.float32(parts[0] + np.float32(0.75))


def test_a_tree_of_another_shape_has_other_bits() -> None:
    """Negative control: the same parts, one after the other."""

    def in_order(parts: list[Tensor]) -> Tensor:
        return ((parts[0] + parts[1]) + parts[2]) + parts[3]

    x, weight = drawn(3, (40, 64), (48, 64))
    meeting = Meeting(4)

    def of_rank(rank: int) -> Tensor:
        own = (one.chunk(4, 1)[rank] for one in (x, weight))
        return RowParallel(1, ThreadExchange(meeting, rank, in_order))(*own, None)

    found, whole = on_ranks(of_rank, 4)[0], RowParallel(4)(x, weight, None)
    assert 0.05 < (found != whole).float().mean() < 0.9
    assert not torch.equal(linear(x, weight), whole)


def test_gradients_are_those_of_the_whole_product() -> None:
    operands = drawn(5, (21, 32), (12, 32), (12,))
    grads = []
    for product in (linear, RowParallel(4), ColumnParallel(4)):
        leaves = [one.clone().requires_grad_() for one in operands]
        product(*leaves).square().sum().backward()
        grads.append([one.grad for one in leaves])
    for others in grads[1:]:
        for one, other in zip(grads[0], others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_ranks_cut_the_vocabulary_as_its_sums_do() -> None:
    assert VOCAB_SHARDS == NUM_VOCAB_SHARDS
