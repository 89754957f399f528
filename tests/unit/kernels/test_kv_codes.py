"""Keys and values in 8 bits: codes against a float64 oracle, and the same numbers however they are
cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels.attention import flash_decode
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.attention.coded_backend import CodedAttention, with_codes
from spmd_rl.kernels.attention.flash import DecodeFlash
from spmd_rl.kernels.attention.flash_backend import FlashAttention
from spmd_rl.kernels.attention.flash_split_kv import DecodeSplits
from spmd_rl.kernels.low_precision.kv_codes import decode_pages, encode_kv, round_kv
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from tests.unit.kernels.paged_case import Data, Heads, Paged, oracle, packed, qkv

CPU = torch.device("cpu")
ALL_CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = ALL_CODES.view(torch.float8_e4m3fn).double().numpy()
EXPONENTS = (1, -2)
HEADS, LENGTHS = Heads(8, 2, 16), [70, 5, 33, 128]


def oracle_code(value: float, exponent: int) -> int:
    """Return the nearest code by float64 distances; of two, the even one."""
    distances = np.abs(np.nan_to_num(NUMBERS, nan=np.inf) - value / 2.0**exponent)
    nearest = np.flatnonzero(distances == distances.min())
    signed = [int(code) for code in nearest if (code >= 128) == bool(np.signbit(value))]
    return min(signed, key=lambda code: code & 1)


def test_bfloat16_holds_what_every_code_stands_for() -> None:
    for exponent in (-32, -7, 0, 3, 32):
        one_page = ALL_CODES.view(1, 1, 256), torch.zeros(1, dtype=torch.int64)
        found = decode_pages(*one_page, exponent, torch.bfloat16)
        wanted = NUMBERS * 2.0**exponent
        assert np.array_equal(found.double().numpy()[0, 0], wanted, equal_nan=True)
        is_number = ~np.isnan(NUMBERS)
        again = encode_kv(found, exponent).flatten()
        assert torch.equal(again[is_number], ALL_CODES[is_number])


@given(
    st.lists(st.floats(-2000, 2000, width=32), min_size=1, max_size=20), st.sampled_from([0, 2, -3])
)
def test_codes_are_the_nearest(values: list[float], exponent: int) -> None:
    found = encode_kv(torch.tensor(values), exponent)
    assert found.tolist() == [oracle_code(one, exponent) for one in values]


def test_what_is_beyond_the_largest_code_becomes_it_and_is_counted() -> None:
    x = torch.tensor([[1e30, -torch.inf, 449.0, 448.0, -448.0, torch.nan, 3.0]])
    clipped = torch.ones((), dtype=torch.int64)
    codes = encode_kv(x, 0, clipped)
    assert codes.tolist() == [[0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x7F, 0x44]]
    assert clipped == 1 + 3
    assert torch.equal(encode_kv(x * 4, 2), codes)


def test_gradients_pass_straight_through() -> None:
    x = torch.linspace(-600, 600, 50).requires_grad_()
    pull = torch.randn(50, generator=torch.Generator().manual_seed(0))
    (round_kv(x, 0) * pull).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, pull)


def data_of(dtype: torch.dtype = torch.float32) -> Data:
    return qkv(sum(LENGTHS), HEADS, dtype=dtype, device=CPU)


def paged_of(page_size: int, dtype: torch.dtype = torch.float32) -> Paged:
    return Paged(LENGTHS, HEADS, page_size, exponents=EXPONENTS, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_of_codes_have_the_bits_of_rounded_sequences(
    page_size: int, dtype: torch.dtype
) -> None:
    data, paged = data_of(dtype), paged_of(page_size, dtype)
    found = paged.chunks(data, [1, 7, 16, 40])
    q, k, v = data
    rounded = q, round_kv(k, EXPONENTS[0]), round_kv(v, EXPONENTS[1])
    wanted = packed(*rounded, LENGTHS, HEADS)[: len(found)]
    assert torch.equal(found, wanted)
    assert torch.equal(packed(*data, LENGTHS, HEADS, exponents=EXPONENTS)[: len(found)], wanted)
    assert not torch.equal(packed(*data, LENGTHS, HEADS)[: len(found)], wanted)
    if dtype == torch.float32:
        near = oracle(*(x.double() for x in rounded), LENGTHS, HEADS)
        torch.testing.assert_close(found.double(), near, rtol=1e-5, atol=1e-5)
    assert (
        paged.cache.num_bytes * dtype.itemsize
        == Paged(LENGTHS, HEADS, page_size, dtype=dtype, device=CPU).cache.num_bytes
    )
    assert paged.cache.code_counts() == {"num_coded": 2 * k.numel(), "num_clipped": 0}


def test_control_a_scale_that_differs_and_one_flipped_code_are_seen() -> None:
    data, paged = data_of(), paged_of(16)
    other = packed(*data, LENGTHS, HEADS, exponents=(EXPONENTS[0], EXPONENTS[1] - 6))
    paged.step({0: 69}, *data)
    paged.cache.data[0, 0, 0, paged.tables[0][0] * 16] ^= 0x10
    rows, last = paged.step({0: 1}, *data)
    wanted = packed(*data, LENGTHS, HEADS, exponents=EXPONENTS)
    assert not torch.equal(last, wanted[rows])
    assert not torch.equal(other, wanted)


def test_pages_of_flash_attention_are_decoded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention itself needs a GPU: a kernel in its place gives back the keys that it got."""
    tables = []

    def chunks(self: Any, page_table: Any, *rest: Any) -> Any:
        tables.append(page_table)
        return lambda q, keys, values: (keys, values)

    monkeypatch.setattr(FlashAttention, "chunks", chunks)
    backend = CodedAttention(FlashAttention(128, CPU), EXPONENTS, CPU)
    heads, dim, size = 2, 16, 4
    cache = torch.zeros(2, *backend.cache_shape(9, size, heads, dim), dtype=torch.uint8)
    k, v = torch.randn(2, 7, heads, dim, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([20, 21, 22, 23, 8, 9, 10])  # pages 5 and 2
    backend.write(KvSlots(cache[0], cache[1], slots), k, v)
    table = np.array([[5, 2, -1], [2, 99, 99]])
    kernel = backend.chunks(table, np.array([5, 0]), np.array([2, 3]), size, 3, torch.zeros(1))
    keys, values = kernel(torch.zeros(5, 3 * heads, dim), cache[0], cache[1])
    assert tables[0].tolist() == [[1, 0, 0], [0, 0, 0]]
    for found, new, exponent in zip((keys, values), (k, v), EXPONENTS, strict=True):
        assert found.shape == (2, size, heads, dim)
        assert torch.equal(found.flatten(0, 1)[[4, 5, 6, 7, 0, 1, 2]], round_kv(new, exponent))


def test_one_new_token_each_is_decoded_over_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is made where the kernel for decoding is there: it would be read too early."""
    monkeypatch.setattr(flash_decode, "has_flash", lambda: True)
    table, starts = np.array([[5, 2, -1], [3, 99, 99]]), np.array([200, 7])
    counter = torch.zeros(1, dtype=torch.int32)
    for split, kind in ((0, DecodeFlash), (256, DecodeSplits)):
        backend = with_codes(FlashAttention(128, CPU, split), EXPONENTS, CPU)
        kernel = backend.chunks(table, starts, np.array([1, 1]), 128, 4, counter)
        assert isinstance(kernel, kind) and kernel.exponents == EXPONENTS
        wanted = [[5, 2, 5], [3, 3, 3]] if split == 0 else [[5, 2], [5, 0], [3, 3], [3, 0]]
        assert kernel.pages.tolist() == wanted
        wanted_keys = [201, 8] if split == 0 else [201, 0, 8, 0]
        assert kernel.num_keys.tolist() == wanted_keys


def test_codes_have_graphs_where_a_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention_backend(16, torch.float32, CPU)
    coded = with_codes(plain, (0, 0), CPU)
    assert coded.facts() == plain.facts()
    assert not coded.fuses_write
    of_flash = with_codes(FlashAttention(128, CPU), (0, 0), CPU)
    assert of_flash.fuses_write and not of_flash.fits_prefill_graphs
    for has_flash in (False, True):
        monkeypatch.setattr(flash_decode, "has_flash", lambda found=has_flash: found)
        assert not coded.fits_cuda_graphs(128, 4)
        assert of_flash.fits_cuda_graphs(128, 64) == has_flash
        assert not of_flash.fits_cuda_graphs(64, 4) and not of_flash.fits_cuda_graphs(128, 65)
    nothing = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="use chunks"):
        coded.decode(nothing, nothing, 16, nothing)
    with pytest.raises(NotImplementedError, match="use chunks"):
        coded.prefill(nothing, nothing, nothing, 1)


def attend_one(backend: Any, x: Tensor) -> Tensor:
    out, _ = backend.one_query(x[0].repeat(2, 1), x, x)
    return out


def test_one_query_attends_to_what_it_is_given() -> None:
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    plain = attention_backend(16, torch.float32, CPU)
    found = [attend_one(with_codes(plain, one, CPU), x) for one in (None, (0, 0))]
    assert torch.equal(*found)
