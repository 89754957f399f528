"""Digits of squares: those of torch's float64 on the CPU, for any shards of the numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from spmd_rl.kernels.rowwise.square_digits_triton import add_square_digits
from spmd_rl.train.fsdp2.exact_norm import _digit_sums


@pytest.mark.parametrize("count", [1, 1000, 32768, 5_000_001])
def test_digits_are_those_of_the_cpu(count: int) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    x = torch.randn(count, device="cuda", generator=generator)
    x *= torch.logspace(-9, 3, count, device="cuda")
    bits = 52 - count.bit_length()
    shift = bits - 2 * int(torch.frexp(x.abs().max()).exponent)
    wanted = _digit_sums(x.cpu(), shift, bits)
    for shards in (1, 7):
        sums = torch.zeros(3, dtype=torch.float64, device="cuda")
        for shard in x.tensor_split(shards):
            add_square_digits(sums, shard, shift, bits)
        assert torch.equal(sums.cpu(), wanted)
    sums.zero_()
    add_square_digits(sums, x * 1.0000001, shift, bits)
    assert count == 1 or not torch.equal(sums.cpu(), wanted)
