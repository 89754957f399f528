"""Boxes: their intersections, differences and chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.weights.plan.layout import Box, chunk_box

SHAPE = (5, 4, 6)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    pairs = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in SHAPE]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


def _count(found: list[Box]) -> np.ndarray:
    count = np.zeros(SHAPE, int)
    for box in found:
        count[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))] += 1
    return count


@given(boxes(), boxes())
def test_intersection_is_the_common_elements(a: Box, b: Box) -> None:
    common = a.intersect(b)
    expected = _count([a]) * _count([b])
    np.testing.assert_array_equal(_count([common] if common else []), expected)


@given(boxes(), boxes())
def test_difference_covers_the_rest_once(a: Box, b: Box) -> None:
    common = a.intersect(b)
    if common is not None:
        np.testing.assert_array_equal(
            _count(list(a.subtract(common))), _count([a]) - _count([common])
        )


def test_a_scalar_is_one_element() -> None:
    scalar = Box((), ())
    assert scalar.num_elements == 1
    assert scalar.intersect(scalar) == scalar
    assert list(scalar.subtract(scalar)) == []


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 64])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 8])
def test_chunks_are_torch_s(rows: int, num_parts: int) -> None:
    chunks = torch.arange(rows).chunk(num_parts)
    for part in range(num_parts):
        box = chunk_box((rows, 3), part, num_parts)
        expected = chunks[part] if part < len(chunks) else torch.arange(0)
        assert torch.equal(torch.arange(rows)[box.offset[0] : box.end[0]], expected)
        assert box.extent == (len(expected), 3)
