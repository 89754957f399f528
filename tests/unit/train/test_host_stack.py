from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.train.optimizer.host_stack import ALIGNMENT, HostStack

BLOCK = 4 * ALIGNMENT
SIZES = st.lists(st.integers(1, 6 * ALIGNMENT), max_size=12)


class Host:
    """Host memory that remembers what was asked for."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def reserve(self, num_bytes: int) -> Tensor:
        self.blocks.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.blocks[-1]


@given(SIZES)
def test_what_is_taken_does_not_overlap(sizes: list[int]) -> None:
    stack = HostStack(Host().reserve, BLOCK)
    taken = [stack.take(size) for size in sizes]
    for number, one in enumerate(taken):
        one.fill_(number)
    for number, (one, size) in enumerate(zip(taken, sizes, strict=True)):
        assert one.tolist() == [number] * size


@given(SIZES, SIZES)
def test_the_same_sizes_need_no_more_memory_again(first: list[int], second: list[int]) -> None:
    host = Host()
    stack = HostStack(host.reserve, BLOCK)
    for sizes in (first, second):
        stack.clear()
        for size in sizes:
            stack.take(size)
    count = len(host.blocks)
    for sizes in (first, second, first):
        stack.clear()
        for size in sizes:
            stack.take(size)
        assert len(host.blocks) == count
    assert stack.num_bytes == sum(map(len, host.blocks))


def test_blocks_are_of_one_size_unless_a_tensor_is_larger() -> None:
    host = Host()
    stack = HostStack(host.reserve, BLOCK)
    for size in (BLOCK // 2, BLOCK // 2, 1, 3 * BLOCK):
        stack.take(size)
    assert list(map(len, host.blocks)) == [BLOCK, BLOCK, 3 * BLOCK]
