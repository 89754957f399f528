"""Distances in units in the last place against an oracle in exact integers."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.microscope.diagnose.ulp import Histogram, distances, histogram

floats = st.floats(width=32, allow_nan=False)


def place(x: float) -> int:
    """How many float32 numbers lie between x and +0, with -0 one below it."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    magnitude = bits & 0x7FFFFFFF
    return magnitude if bits == magnitude else -1 - magnitude


@given(floats, floats)
def test_float32_distances_are_the_oracles(x: float, y: float) -> None:
    assert int(distances(torch.tensor([x]), torch.tensor([y]))) == abs(place(x) - place(y))


@given(floats)
def test_a_neighbour_is_one_step_away(x: float) -> None:
    up = torch.nextafter(torch.tensor([x]), torch.tensor([torch.inf]))
    if x not in (0.0, float("inf")) and up.item() != 0:
        assert int(distances(torch.tensor([x]), up)) == 1


@given(st.integers(0, 0x7F80), st.integers(0, 0x7F80), st.booleans())
def test_bfloat16_distances_count_bfloat16_numbers(x: int, y: int, negative: bool) -> None:
    a, b = torch.tensor([x], dtype=torch.int16), torch.tensor([y], dtype=torch.int16)
    one, other = a.view(torch.bfloat16), b.view(torch.bfloat16)
    assert int(distances(one, other)) == abs(x - y)
    assert int(distances(-one, other)) == x + y + 1
    if negative:
        assert int(distances(-one, -other)) == abs(x - y)


def test_between_two_formats_the_coarser_one_counts() -> None:
    x = torch.tensor([1.0, 1.001, 1.02])
    assert distances(x, x.bfloat16()).tolist() == [0, 0, 0]
    assert distances(x, torch.tensor([1.0, 1.0, 1.03125]).bfloat16()).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        ([0, 0], (2,)),
        ([0, 1, 2, 3, 4], (1, 1, 2, 1)),
        ([7, 8, 9, 1000], (0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 1)),
    ],
)
def test_histogram_counts_by_powers_of_two(steps: list[int], counts: tuple[int, ...]) -> None:
    base = torch.full((len(steps),), 1.0).view(torch.int32)
    x, y = (
        base.view(torch.float32),
        (base + torch.tensor(steps, dtype=torch.int32)).view(torch.float32),
    )
    assert histogram(x, y) == Histogram(counts, max(steps))
    assert histogram(x, y).unequal == sum(step > 0 for step in steps)
    for bucket, count in enumerate(counts):
        if count and bucket > 1:
            low, high = map(int, Histogram.label(bucket).split("–"))
            assert sum(low <= step <= high for step in steps) == count
