"""Norms of sums over ranks have the bits of the two kernels. Ranks are buffers of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import add_rms_norm
from spmd_rl.kernels.runtime.cuda_graph import record
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours

pytest.importorskip("triton")

from spmd_rl.kernels.linear.peer_norms_triton import NormedRows, norm_of_peers
from spmd_rl.kernels.linear.peer_sums_triton import (
    PeerBuffers,
    put,
    shares_of_peers,
    sum_of_peers,
    sum_own_share,
)

EPS = 1e-6
pytestmark = pytest.mark.timeout(300)
NUM_WORDS = 1 << 21
SIZES = (96, 768, 1000, 1024, 2560, 4096, 5120, 8192)


class Peers:
    """Buffers of some ranks, of which the first is this one's."""

    def __init__(self, num_ranks: int) -> None:
        memory = torch.zeros(num_ranks, 2, NUM_WORDS, dtype=torch.int32, device="cuda")
        peers = torch.tensor([one.data_ptr() for one in memory], device="cuda")
        self._turns = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.each = [PeerBuffers(one, peers, self._turns) for one in memory]

    def give(self, parts: Tensor) -> PeerBuffers:
        """Have each rank give its part. Shape: [P, T, N] fp32."""
        for buffers, part in zip(self.each, parts, strict=True):
            put(part.view(torch.int32), buffers)
        return self.each[0]


class Case(NamedTuple):
    """What ranks give, and what a norm takes beside it.

    Shape: parts [P, T, N] fp32, residual [T, N], bias and weight [N].
    """

    parts: Tensor
    bias: Tensor | None
    residual: Tensor
    weight: Tensor

    def turns(self) -> Iterator[tuple[range, Tensor]]:
        """The rows that fit the buffers at once, and all parts of them."""
        num_rows, size = self.residual.shape
        most = NUM_WORDS // size
        for first in range(0, num_rows, most):
            rows = range(num_rows)[first : first + most]
            yield rows, self.parts[:, rows.start : rows.stop].contiguous()


def fused(peers: Peers, case: Case) -> tuple[Tensor, Tensor]:
    residual = case.residual
    every = NormedRows(residual, torch.empty_like(residual), torch.empty_like(residual))
    for rows, given in case.turns():
        norm_of_peers(every, rows, case.bias, case.weight, EPS, peers.give(given))
    return every.out, every.summed


def apart(peers: Peers, case: Case) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(case.residual)
    for rows, given in case.turns():
        sum_of_peers(total[rows.start : rows.stop], case.bias, peers.give(given))
    return add_rms_norm(total, case.residual, case.weight, EPS)


@pytest.fixture(scope="module")
def case_of(rows) -> Callable[..., Case]:
    def make(
        kind: str, num_ranks: int, num_rows: int, size: int, dtype: torch.dtype, has_bias: bool
    ) -> Case:
        parts = rows(kind, num_ranks * num_rows, size, torch.float32)
        bias, weight = rows(kind, 1, size, dtype)[0], rows("normal", 2, size, dtype)[1]
        residual = rows(kind, num_rows, size, dtype)
        parts = parts.view(num_ranks, num_rows, size)
        return Case(parts, bias if has_bias else None, residual, weight)

    return make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_kernel_has_the_bits_of_two(
    num_ranks: int, size: int, dtype: torch.dtype, case_of, unequal
) -> None:
    peers, kinds = Peers(num_ranks), ("normal", "wide", "cancelling")
    for kind, num_rows, has_bias in product(kinds, (1, 3, 64, 300, 2048), (False, True)):
        case = case_of(kind, num_ranks, num_rows, size, dtype, has_bias)
        pairs = zip(fused(peers, case), apart(peers, case), strict=True)
        assert [unequal(*pair) for pair in pairs] == [0, 0], (kind, num_rows, has_bias)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_shares_of_ranks_are_the_sum_at_once(num_ranks: int, case_of, unequal) -> None:
    peers = Peers(num_ranks)
    for size, num_rows, has_bias in product((96, 1000, 4096), (1, 64, 300), (False, True)):
        case = case_of("wide", num_ranks, num_rows, size, torch.bfloat16, has_bias)
        buffers = peers.give(case.parts)
        for rank, own in enumerate(peers.each):
            sum_own_share(case.residual.shape, rank, case.bias, torch.bfloat16, own)
        shares, whole = torch.empty_like(case.residual), torch.empty_like(case.residual)
        shares_of_peers(shares, buffers)
        sum_of_peers(whole, case.bias, buffers)
        assert unequal(shares, whole) == 0


def test_replays_have_these_bits_in_any_order(case_of, unequal) -> None:
    peers, memory = Peers(4), torch.cuda.graph_pool_handle()
    cases = [case_of("normal", 4, rows, 4096, torch.bfloat16, rows > 8) for rows in (16, 1)]
    graphs = [record(partial(fused, peers, case), memory) for case in cases]
    for turn in range(30):
        graph, found = graphs[turn % 3 % 2]
        case = cases[turn % 3 % 2]
        case.parts.mul_(-1.01)
        graph.replay()
        pairs = zip(found, apart(peers, case), strict=True)
        assert [unequal(*pair) for pair in pairs] == [0, 0]


def test_another_order_of_ranks_is_seen(case_of, unequal) -> None:
    """Negative control: the same parts, one after the other."""
    case = case_of("normal", 4, 64, 4096, torch.float32, False)
    ours, summed = fused(Peers(4), case)
    tree = sum_neighbours(list(case.parts.clone()))
    assert unequal(summed, case.residual + tree) == 0
    in_order = ((case.parts[0] + case.parts[1]) + case.parts[2]) + case.parts[3]
    other, _ = add_rms_norm(in_order, case.residual, case.weight, EPS)
    assert unequal(ours, other) > 0.05 * ours.numel()
