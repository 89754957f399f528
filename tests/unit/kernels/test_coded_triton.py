"""Kernels for weights in few bits: rounding in Triton's interpreter, and what unpacks on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spmd_rl.kernels.low_precision import block_codes, e4m3_triton, int4_triton
from spmd_rl.model.formats import FORMATS
from spmd_rl.model.formats.int4 import INT4
from spmd_rl.types.code_format import CodeFormat
from tests.unit.kernels.interpreted import Calls, results
from tests.unit.kernels.ptx_words import WORD, pair, run, word

CALLS = "tests.unit.kernels.rounding_calls"
BYTES = torch.arange(256)
# four bytes of each kind, in each place
WORDS = BYTES | BYTES.flip(0) << 8 | (BYTES * 7 + 3) % 256 << 16 | (BYTES * 5 + 1) % 256 << 24


def codes_in(words: Tensor) -> Tensor:
    """Return the bytes of words. Shape: [n]; [n, 4]."""
    return torch.stack([words >> 8 * place & 0xFF for place in range(4)], 1).to(torch.uint8)


def test_rounding_is_that_of_the_cpu(tmp_path: Path) -> None:
    """On rows of a whole weight and on some, with ties, and a last block of few columns."""
    calls, wanted = [], []
    for rows, columns, first_row in ((5, 300, 0), (40, 136, 3), (2, 60, 1)):
        generator = torch.Generator().manual_seed(columns)
        values = torch.randn(rows, columns, generator=generator)
        values *= torch.randn(rows, 1, generator=generator).mul(3).exp2()
        values[0, :6] = torch.tensor([7.0, 0.5, 1.5, -2.5, -0.0, 0.0])
        values[1, 1] = torch.nan
        scales = INT4.scales_of(block_codes.maxima(INT4, values, rows + first_row, first_row))
        codes = block_codes.encode(INT4, values, scales, first_row)
        calls.append(("int4", values, scales, first_row))
        wanted.append(
            (codes, block_codes.decode(INT4, codes, scales, columns, torch.float32, first_row))
        )
    found = results(Calls(CALLS, "of_rows", {}, calls), tmp_path)
    for (codes, rounded, decoded), (expected, numbers) in zip(found, wanted, strict=True):
        assert torch.equal(codes, expected)
        assert torch.equal(rounded.nan_to_num(99), numbers.nan_to_num(99))
        assert torch.equal(decoded.float().nan_to_num(99), numbers.nan_to_num(99))


def test_several_weights_are_rounded_as_each_alone(tmp_path: Path) -> None:
    """Some rows of them, in memory for more."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 37, 200, generator=generator)
    scales = INT4.scales_of(block_codes.maxima(INT4, values, 40, 3))
    calls = [("int4", values, scales, 3, 41)]
    (found,) = results(Calls(CALLS, "of_several", {}, calls), tmp_path)
    expected = block_codes.rounded_each(INT4, list(values), list(scales), torch.float32, 3, 41)
    each = [
        block_codes.rounded(INT4, *one, torch.float32, 3)
        for one in zip(values, scales, strict=True)
    ]
    assert torch.equal(expected[:, :37], torch.stack(each)) and not expected[:, 37:].any()
    assert torch.equal(found[:, :37], expected[:, :37]) and bool((found[:, 37:] == 9).all())


@pytest.mark.parametrize("exponent", [-117, -3, 0, 7])
def test_the_instructions_unpack_every_code_of_8_bits(exponent: int) -> None:
    scale = torch.full((256, 2), 2.0**exponent * e4m3_triton._SHIFT).bfloat16()
    found = run(e4m3_triton.UNPACK.value, {"$2": WORDS, "$3": word(scale)})
    numbers = torch.cat([pair(found["$0"]), pair(found["$1"])], 1).float()
    codes = codes_in(WORDS)
    is_number = (codes & 0x7F) != 0x7F
    expected = codes.view(torch.float8_e4m3fn).float() * 2.0**exponent
    assert torch.equal(numbers[is_number], expected[is_number])


@pytest.mark.parametrize(
    "scales", [(2.0**-117, 31.0, 17 * 2.0**-9, 1.0), (2.0**13, 0.0, 29.0, 3.0)]
)
@pytest.mark.parametrize("part", [0, 1])
def test_the_instructions_unpack_every_code_of_4_bits(part: int, scales: tuple[float, ...]) -> None:
    """Four codes have four scales: a thread's may lie in several rows."""
    given = torch.tensor(scales).bfloat16().repeat(256, 1)
    source = (int4_triton.LOW, int4_triton.HIGH)[part].value
    words = {"$2": WORDS, "$3": word(given[:, :2]), "$4": word(given[:, 2:])}
    found = run(source, words)
    numbers = torch.cat([pair(found["$0"]), pair(found["$1"])], 1).float()
    nibbles = (codes_in(WORDS) >> 4 * part).int() & 15
    assert torch.equal(numbers, ((nibbles ^ 8) - 8) * torch.tensor(scales))


def test_control_a_mask_of_one_bit_less_is_found() -> None:
    source = int4_triton.LOW.value.replace("0x0f0f0f0f", "0x0f0f0f07")
    ones = word(torch.ones(256, 2).bfloat16())
    whole, spoilt = (
        run(one, {"$2": WORDS, "$3": ones, "$4": ones})["$0"]
        for one in (int4_triton.LOW.value, source)
    )
    assert (whole != spoilt).any() and bool((whole <= WORD).all())


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
def test_codes_are_written_where_they_are_wanted(own: CodeFormat) -> None:
    values = torch.randn(5, 200)
    scales = own.scales_of(block_codes.maxima(own, values, 9, 3))
    expected = block_codes.encode(own, values, scales, 3)
    room = torch.zeros(7, expected.shape[1] + 16, dtype=torch.uint8).view(expected.dtype)
    found = block_codes.encode(own, values, scales, 3, room[1:-1, 16:])
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert found.data_ptr() == room[1:-1, 16:].data_ptr()
    others = torch.ones(room.shape, dtype=torch.bool)
    others[1:-1, 16:] = False
    assert not room.view(torch.uint8)[others].any()
