"""Keys and values in 8 bits on a GPU: the codes of the CPU, and pages with the trainer's bits."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.kernels.low_precision.kv_codes import decode_pages, encode_kv, round_kv
from tests.gpu.kernels.paged_case import DEVICE, qkv
from tests.unit.kernels import paged_case
from tests.unit.kernels.paged_case import Heads, packed

EXPONENTS = (1, -2)
LENGTHS = [1, 16, 127, 128, 129, 700, 255, 1500]
ROUNDS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not ROUNDS, reason="the kernels need e4m3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [0, 3, -5])
def test_codes_are_those_of_the_cpu(exponent: int, dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)  # every number of bfloat16
    x = (bits << 16).view(torch.float32).view(-1, 4, 64)
    given = x[:, 1:3].to(dtype)
    counts = [torch.zeros((), dtype=torch.int64, device=one) for one in ("cpu", "cuda")]
    wanted = encode_kv(given, exponent, counts[0])
    found = encode_kv(x.cuda().to(dtype)[:, 1:3], exponent, counts[1])
    is_nan = given.isnan()
    assert torch.equal(found.cpu()[~is_nan], wanted[~is_nan])
    assert ((found.cpu()[is_nan] & 0x7F) == 0x7F).all()
    assert counts[0] == counts[1] > 0
    rounded = round_kv(given.cuda(), exponent)
    assert torch.equal(rounded.cpu()[~is_nan], round_kv(given, exponent)[~is_nan])


def test_pages_are_decoded_as_on_the_cpu() -> None:
    codes = torch.randint(0, 127, (2, 9, 128, 8, 128), dtype=torch.uint8)
    pages = torch.tensor([7, 0, 3])
    wanted = decode_pages(codes, pages, -2, torch.bfloat16)
    assert torch.equal(decode_pages(codes.cuda(), pages.cuda(), -2, torch.bfloat16).cpu(), wanted)


@pytest.mark.parametrize("split", [0, 256])
@pytest.mark.parametrize("heads", [Heads(16, 8, 128), Heads(14, 2, 64), Heads(9, 3, 80)])
def test_pages_of_codes_equal_packed(heads: Heads, split: int, unequal) -> None:
    if split and heads.dim == 80:
        pytest.skip("splits are FlashAttention's")
    data = qkv(sum(LENGTHS), heads)
    paged = paged_case.Paged(
        LENGTHS, heads, 128, split=split, exponents=EXPONENTS, dtype=torch.bfloat16, device=DEVICE
    )
    found = paged.chunks(data, [1, 2, 17, 100, 128, 512])
    assert unequal(found, packed(*data, LENGTHS, heads, split, EXPONENTS)) == 0
    assert unequal(found, packed(*data, LENGTHS, heads, split)) > 0
