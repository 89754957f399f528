"""Digits of squares on GPUs, in Triton's interpreter: those of torch's float64, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spmd_rl.kernels.rowwise import square_digits_triton
from spmd_rl.train.fsdp2.exact_norm import _digit_sums
from tests.unit.kernels.compiled import instructions, ptx_of
from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.square_digits_calls"
BITS = 24


def drawn(count: int, exponent: float) -> Tensor:
    """Return numbers of very different sizes, also zeros and subnormal ones."""
    generator = torch.Generator().manual_seed(count)
    scales = torch.logspace(exponent - 9, exponent, count, dtype=torch.float64)
    x = (torch.randn(count, generator=generator).double() * scales).float()
    x[::7] = 0.0
    x[3::11] = 1e-42
    return x


def test_digits_are_those_of_torch(tmp_path: Path) -> None:
    given = [
        (x, BITS - 2 * torch.frexp(x.abs().max()).exponent.item() + odd, BITS)
        for x in (drawn(1, 0), drawn(5000, -20), drawn(40000, 3), drawn(33000, 12))
        for odd in (0, -1)
    ]
    found = results(Calls(CALLS, "digits", {}, given), tmp_path)
    for one, (x, shift, bits) in zip(found, given, strict=True):
        wanted = _digit_sums(x, shift, bits)
        assert torch.equal(one, wanted)
        assert wanted[2] != 0 or len(x) == 1


def test_numbers_are_read_in_units_of_16_bytes() -> None:
    x, sums = torch.zeros(1 << 20), torch.zeros(3, dtype=torch.float64)
    kernel = square_digits_triton._add_square_digits
    ptx = ptx_of(kernel, lambda: square_digits_triton.add_square_digits(sums, x, 5, 20))
    found = instructions(ptx)
    loads = {name: number for name, number in found.items() if name.startswith("ld.global")}
    assert set(loads) == {"ld.global.v4.b32"}
    assert sum(number for name, number in found.items() if name.startswith("atom")) == 3
