"""Weights in 4 bits: codes and scales against a float64 oracle, and what makes bf16 exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.model.formats.int4 import INT4, LEAST_SCALE, MOST_SCALE

CODES = range(-8, 8)
# every scale: 16 to 31 times a power of two, and the largest
SCALES = [n * 2.0 ** (k - 4) for k in range(-117, 13) for n in range(16, 32)] + [MOST_SCALE]

BLOCK = INT4.block_columns


def of_codes(codes: list[int], scale: float) -> BlockCodes:
    """Return one row of a few codes, packed by hand."""
    row = codes + [0] * (BLOCK - len(codes))
    packed = [(low & 15) | (high & 15) << 4 for low, high in zip(row[:64], row[64:], strict=True)]
    scales = torch.tensor([[scale]], dtype=torch.bfloat16)
    return BlockCodes(torch.tensor([packed], dtype=torch.uint8), scales, len(codes), INT4)


def is_exact(scale: float) -> bool:
    """Return whether bfloat16 and float32 hold each code times this scale."""
    coded = of_codes(list(CODES), scale)
    wanted = np.array([code * float(np.float32(scale)) for code in CODES])
    coded = BlockCodes(coded.codes, torch.tensor([[scale]]), coded.num_columns, INT4)
    found = [coded.decoded(dtype).double().numpy()[0] for dtype in (torch.bfloat16, torch.float32)]
    return all(np.array_equal(one, wanted) for one in found)


def weights(seed: int, rows: int, columns: int) -> Tensor:
    """Return a weight whose groups have magnitudes far apart."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-60, 13, INT4.scale_shape((rows, columns)), generator=generator)
    factors = spread.double().exp2().float().repeat_interleave(BLOCK, 1)[:, :columns]
    return torch.randn(rows, columns, generator=generator) * factors


def test_every_code_with_every_scale_is_a_bfloat16_number() -> None:
    assert len(SCALES) == 16 * 130 + 1 and min(SCALES) == LEAST_SCALE and max(SCALES) == MOST_SCALE
    assert [scale for scale in SCALES if not is_exact(scale)] == []


@pytest.mark.parametrize("scale", [63.0, 37.0, 0.3, 1.0 / 7])
def test_a_scale_of_more_bits_is_found(scale: float) -> None:
    assert not is_exact(scale)


@given(st.floats(2.0**-114, 57344, width=32))
@settings(deadline=None)
def test_the_scale_is_the_least_that_holds_the_maximum(maximum: float) -> None:
    scale = float(INT4.scales_of(torch.tensor([[maximum]], dtype=torch.float32)))
    mantissa, _ = np.frexp(scale)
    assert mantissa * 32 == int(mantissa * 32)  # five significant bits
    step = 2.0 ** (np.frexp(scale)[1] - 5)
    below = scale - (step if mantissa > 0.5 else step / 2)
    assert Fraction(7) * Fraction(below) < Fraction(maximum) <= Fraction(7) * Fraction(scale)


@pytest.mark.parametrize("scale", [2.0**-100, 17 * 2.0**-9, 1.0, 31 * 2.0**3])
def test_the_scale_changes_just_above_seven_of_it(scale: float) -> None:
    edge = torch.tensor(7 * scale)
    above = torch.nextafter(edge, torch.tensor(torch.inf))
    found = INT4.scales_of(torch.stack([edge, above]))
    assert found[0] == scale < found[1]


def test_magnitudes_near_zero_have_the_least_scale() -> None:
    maxima = torch.tensor([0.0, 1e-45, 7 * LEAST_SCALE])
    assert INT4.scales_of(maxima).tolist() == [LEAST_SCALE] * 3


@given(st.lists(st.floats(-57344, 57344, width=32), min_size=1, max_size=200))
@settings(deadline=None)
def test_codes_are_the_nearest(values: list[float]) -> None:
    """The quotient is that of float32: a number half between two codes may become either."""
    weight = torch.tensor([values])
    coded = block_codes.quantised(INT4, weight)
    codes = INT4.numbers(coded.codes, len(values))[0].tolist()
    scales = coded.scales.double().repeat_interleave(BLOCK, 1)[0].tolist()
    for value, code, scale in zip(weight[0].tolist(), codes, scales, strict=False):
        assert -7 <= code <= 7
        assert abs(code - value / scale) <= 0.5 + 2.0**-20


def test_a_tie_goes_to_the_even_code() -> None:
    values = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.0]])
    assert block_codes.quantised(INT4, values).decoded(torch.float32).tolist() == [
        [0, 2, 2, 0, -2, -2, 7]
    ]


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 128, 200, 384])
def test_bytes_have_columns_of_both_halves_of_a_block(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    values = torch.randint(-7, 8, (3, columns), generator=generator).float()
    values[:, ::BLOCK] = 7  # so that each scale is 1
    coded = block_codes.quantised(INT4, values)
    assert coded.codes.shape == (3, -(-columns // BLOCK) * 64)
    for row in range(3):
        for column in range(columns):
            byte = int(coded.codes[row, column // BLOCK * 64 + column % 64])
            nibble = byte >> 4 if column % BLOCK >= 64 else byte & 15
            assert (nibble ^ 8) - 8 == values[row, column]
    assert torch.equal(coded.decoded(torch.float32), values)


@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 9), st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_any_division_of_the_rows_gives_the_same_codes(
    rows: int, columns: int, num_parts: int, seed: int
) -> None:
    weight = weights(seed, rows, columns)
    whole, chunk = block_codes.quantised(INT4, weight), -(-rows // num_parts)
    starts = [min(part * chunk, rows) for part in range(num_parts)]
    parts = [weight[start : start + chunk] for start in starts]
    maxima = [
        block_codes.maxima(INT4, p, rows, start) for p, start in zip(parts, starts, strict=True)
    ]
    scales = INT4.scales_of(torch.stack(maxima).amax(0))
    codes = [
        block_codes.encode(INT4, p, scales, start) for p, start in zip(parts, starts, strict=True)
    ]
    assert torch.equal(scales, whole.scales.float())
    assert torch.equal(torch.cat(codes), whole.codes)
    rounded = [
        block_codes.rounded(INT4, p, scales, torch.bfloat16, start)
        for p, start in zip(parts, starts, strict=True)
    ]
    assert torch.equal(torch.cat(rounded), whole.decoded(torch.bfloat16))


@pytest.mark.parametrize("shape", [(128, 128), (100, 130), (1, 1), (129, 257)])
def test_values_that_are_codes_stay_as_they_are(shape: tuple[int, int]) -> None:
    once = block_codes.quantised(INT4, weights(1, *shape)).decoded(torch.float32)
    assert torch.equal(block_codes.quantised(INT4, once).decoded(torch.float32), once)
    assert torch.equal(block_codes.quantised(INT4, -once).decoded(torch.float32), -once)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 57345.0])
def test_what_codes_cannot_hold_is_seen(bad: float) -> None:
    weight = torch.ones(3, 300)
    weight[1, 1] = bad
    found = block_codes.quantised(INT4, weight).decoded(torch.bfloat16).isnan()
    assert bool(found[1, :BLOCK].all()) and int(found.sum()) == BLOCK


def test_zeros_stay_zero() -> None:
    assert not block_codes.quantised(INT4, torch.zeros(3, 130)).decoded(torch.bfloat16).any()


@pytest.mark.parametrize(("columns", "least", "most"), [(BLOCK, 1.65, 2.55), (32, 1.25, 1.65)])
def test_powers_of_two_are_coarser_for_normal_weights(
    columns: int, least: float, most: float
) -> None:
    """For every spread of the weights, which a power of two divides into octaves."""
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for spread in np.exp2(np.arange(8) / 8):
        values = torch.randn(512, 1024, generator=generator) * float(spread)
        groups = values.unflatten(1, (-1, columns))
        scales = (groups.abs().amax(-1, keepdim=True) / 7).log2().ceil().exp2()
        coarse = (groups / scales).round() * scales
        fine = block_codes.quantised(INT4, values).decoded(torch.float32)
        errors = [(one - values).square().mean() for one in (coarse.flatten(1), fine)]
        ratios.append(float(errors[0] / errors[1]))
    assert least < min(ratios) and max(ratios) < most
