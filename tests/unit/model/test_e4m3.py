"""Weights in 8 bits: codes and scales against a float64 oracle, and what makes bf16 exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.model.formats.e4m3 import E4M3, LEAST_EXPONENT, MOST_EXPONENT

ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
VALUES = np.array([float(code) for code in ALL_CODES.double()])  # of all codes; two are NaN
EXPONENTS = range(LEAST_EXPONENT, MOST_EXPONENT + 1)

BLOCK = E4M3.block_columns


def decoded(scale: float, dtype: torch.dtype) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return what all 256 codes are with this scale, as float64."""
    codes = ALL_CODES.view(1, -1)
    scales = torch.full(E4M3.scale_shape((1, 256)), scale)
    return block_codes.decode(E4M3, codes, scales, 256, dtype).double().numpy()[0]


def is_exact(scale: float) -> bool:
    return bool(np.array_equal(decoded(scale, torch.bfloat16), VALUES * scale, equal_nan=True))


def oracle_exponent(maximum: float) -> int:
    """Return the least exponent whose 448-fold reaches the maximum."""
    return next(k for k in EXPONENTS if 448.0 * 2.0**k >= maximum)


def oracle_code(value: float, scale: float) -> int:
    """Return the nearest code by float64 distances; of two, the one whose last bit is 0."""
    distances = np.abs(np.nan_to_num(VALUES, nan=np.inf) - value / scale)
    nearest = np.flatnonzero(distances == distances.min())
    signed = [int(code) for code in nearest if (code >= 128) == bool(np.signbit(value))]
    return min(signed or [int(code) for code in nearest], key=lambda code: code & 1)


def weights(seed: int, rows: int, columns: int) -> Tensor:
    """Return a weight whose blocks have magnitudes far apart."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-60, 13, E4M3.scale_shape((rows, columns)), generator=generator)
    factors = spread.double().exp2().float().repeat_interleave(BLOCK, 0)[:rows]
    factors = factors.repeat_interleave(BLOCK, 1)[:, :columns]
    return torch.randn(rows, columns, generator=generator) * factors


def test_every_code_with_every_scale_is_a_bfloat16_number() -> None:
    assert [k for k in EXPONENTS if not is_exact(2.0**k)] == []


def test_fp32_holds_the_same_numbers() -> None:
    for k in (LEAST_EXPONENT, -9, 0, MOST_EXPONENT):
        bf16, fp32 = decoded(2.0**k, torch.bfloat16), decoded(2.0**k, torch.float32)
        assert np.array_equal(bf16, fp32, equal_nan=True)


def test_no_code_becomes_a_denormal_of_bfloat16() -> None:
    smallest = np.abs(decoded(2.0**LEAST_EXPONENT, torch.bfloat16))
    assert smallest[smallest > 0].min() == 2.0**-126


@pytest.mark.parametrize("scale", [0.3, 1.0 / 448, 0.0123])
def test_a_scale_that_is_no_power_of_two_is_found(scale: float) -> None:
    assert not is_exact(float(np.float32(scale)))


@given(st.floats(0, 57344, width=32))
@settings(deadline=None)
def test_the_scale_is_the_least_that_holds_the_maximum(maximum: float) -> None:
    scale = float(E4M3.scales_of(torch.tensor([[maximum]], dtype=torch.float32)))
    assert scale == 2.0 ** oracle_exponent(maximum)


@pytest.mark.parametrize("k", [-117, -100, -1, 0, 6])
def test_the_scale_changes_just_above_448(k: int) -> None:
    edge = torch.tensor(448.0 * 2.0**k)
    above = torch.nextafter(edge, torch.tensor(torch.inf))
    assert E4M3.scales_of(torch.stack([edge, above])).tolist() == [2.0**k, 2.0 ** (k + 1)]


@given(st.lists(st.floats(-57344, 57344, width=32), min_size=1, max_size=40))
@settings(deadline=None)
def test_codes_are_the_nearest(values: list[float]) -> None:
    weight = torch.tensor([values])
    coded = block_codes.quantised(E4M3, weight)
    expected = [oracle_code(value, float(coded.scales)) for value in weight[0].tolist()]
    found = coded.codes.view(torch.uint8)[0].tolist()
    # both zeros are the same number
    assert [VALUES[code] for code in found] == [VALUES[code] for code in expected]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_maxima_are_those_of_the_blocks(rows: int, columns: int, seed: int) -> None:
    weight = weights(seed, rows, columns)
    maxima = block_codes.maxima(E4M3, weight, rows)
    assert maxima.shape == E4M3.scale_shape((rows, columns))
    for row in range(maxima.shape[0]):
        for column in range(maxima.shape[1]):
            block = weight[row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK]
            assert maxima[row, column] == block.abs().max()


def test_several_weights_have_the_maxima_of_each() -> None:
    several = torch.stack([weights(seed, 70, 200) for seed in range(3)])
    each = [block_codes.maxima(E4M3, weight, 300, 100) for weight in several]
    assert torch.equal(block_codes.maxima(E4M3, several, 300, 100), torch.stack(each))


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 9), st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_any_division_of_the_rows_gives_the_same_codes(
    rows: int, columns: int, num_parts: int, seed: int
) -> None:
    weight = weights(seed, rows, columns)
    whole = block_codes.quantised(E4M3, weight)
    chunk = -(-rows // num_parts)
    starts = [min(part * chunk, rows) for part in range(num_parts)]
    parts = [weight[start : start + chunk] for start in starts]
    maxima = [
        block_codes.maxima(E4M3, p, rows, start) for p, start in zip(parts, starts, strict=True)
    ]
    scales = E4M3.scales_of(torch.stack(maxima).amax(0))
    codes = [
        block_codes.encode(E4M3, p, scales, start) for p, start in zip(parts, starts, strict=True)
    ]
    assert torch.equal(scales, whole.scales)
    assert torch.equal(torch.cat([c.view(torch.uint8) for c in codes]), as_bits(whole.codes))
    back = [
        block_codes.decode(E4M3, c, scales, columns, torch.bfloat16, start)
        for c, start in zip(codes, starts, strict=True)
    ]
    assert torch.equal(torch.cat(back), whole.decoded(torch.bfloat16))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (100, 130), (1, 1), (129, 257)])
def test_values_that_are_codes_stay_as_they_are(shape: tuple[int, int]) -> None:
    once = block_codes.quantised(E4M3, weights(1, *shape)).decoded(torch.float32)
    assert torch.equal(block_codes.quantised(E4M3, once).decoded(torch.float32), once)


def test_errors_are_at_most_half_a_step() -> None:
    weight = weights(2, 200, 300)
    coded = block_codes.quantised(E4M3, weight)
    back = coded.decoded(torch.float32)
    ones = torch.ones_like(weight).to(coded.codes.dtype)
    steps = replace(coded, codes=ones).decoded(torch.float32)  # the scales
    allowed = torch.maximum(weight.abs() * 2.0**-4, steps * 2.0**-10)
    assert bool(((back - weight).abs() <= allowed).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 57345.0])
def test_what_codes_cannot_hold_is_seen(bad: float) -> None:
    weight = torch.ones(3, 3)
    weight[1, 1] = bad
    assert bool(block_codes.quantised(E4M3, weight).decoded(torch.bfloat16)[1, 1].isnan())


def test_zeros_stay_zero() -> None:
    assert not block_codes.quantised(E4M3, torch.zeros(130, 5)).decoded(torch.bfloat16).any()


def as_bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)
