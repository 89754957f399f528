"""Kernels for codes of keys and values: in Triton's interpreter, and compiled for Hopper.

The interpreter rounds 127.5 to 64 in place of 128. So it is given numbers that codes stand for, and
numbers beyond them; rounding is one instruction, which the compiled kernel has.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.kv_codes import decode_pages, encode_kv, round_kv

pytest.importorskip("triton")

from spmd_rl.kernels.low_precision import kv_codes_triton
from tests.unit.kernels.compiled import instructions, ptx_of
from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.kv_codes_calls"
CASES = [  # tokens, heads, size, exponent, dtype
    (5, 2, 16, 0, torch.float32),
    (1, 3, 24, -4, torch.bfloat16),
    (3, 9, 128, 5, torch.bfloat16),  # rows longer than a program
    (0, 2, 16, 0, torch.bfloat16),
]


def codes_of(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0)


def numbers(*shape: int, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that codes stand for, and a few beyond."""
    every = torch.arange(1)
    found = decode_pages(codes_of(1, 1, *shape), every, exponent, dtype)[0, 0]
    if found.numel():
        found[0, 0, :2] = torch.tensor([1e20, -1e9])
    return found


def test_tokens_have_the_codes_of_the_cpu(tmp_path: Path) -> None:
    given = []
    for *shape, exponent, dtype in CASES:
        joined = numbers(shape[0], 3 * shape[1], shape[2], exponent=exponent, dtype=dtype)
        given += [(joined, exponent), (joined[:, : shape[1]], exponent)]  # a slice of a product
    found = results(Calls(CALLS, "of_tokens", {}, given), tmp_path)
    for (x, exponent), (codes, clipped, rounded) in zip(given, found, strict=True):
        count = torch.zeros((), dtype=torch.int64)
        assert torch.equal(codes, encode_kv(x, exponent, count))
        assert torch.equal(rounded, round_kv(x, exponent)) and rounded.dtype == x.dtype
        assert clipped == count == (2 if len(x) else 0)


def test_pages_have_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    pages = torch.tensor([3, 0, 5])
    given = [(codes_of(1, 7, 4, 2, 16), pages, -2), (codes_of(6, 7, 16 * 128), pages, 3)]
    found = results(Calls(CALLS, "of_pages", {}, given), tmp_path)
    for (codes, _, exponent), decoded in zip(given, found, strict=True):
        assert torch.equal(decoded, decode_pages(codes, pages, exponent, torch.bfloat16))


def test_one_instruction_rounds_and_saturates() -> None:
    x = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    kernel = kv_codes_triton._convert
    for launch in (
        lambda: kv_codes_triton.encode_on_gpu(x, 1, torch.zeros((), dtype=torch.int64)),
        lambda: kv_codes_triton.round_on_gpu(x, 1),
    ):
        assert instructions(ptx_of(kernel, launch))["cvt.rn.satfinite.e4m3x2.f32"] > 0
    codes, pages = torch.zeros(1, 3, 128, 8, 128, dtype=torch.uint8), torch.zeros(2).long()
    found = instructions(
        ptx_of(kernel, lambda: kv_codes_triton.decode_pages_on_gpu(codes, pages, 0, x.dtype))
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" not in found
