from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.train.optimizer.moment_chunks import UNIT, MomentLayout, lay_out

SIZES = st.lists(st.integers(0, 5 * UNIT), max_size=8)


def laid_out(sizes: list[int], units: int) -> MomentLayout:
    return lay_out({str(number): size for number, size in enumerate(sizes)}, units * UNIT)


@given(SIZES, st.integers(1, 4))
def test_each_element_is_in_one_chunk_at_its_offset(sizes: list[int], units: int) -> None:
    layout = laid_out(sizes, units)
    seen: dict[str, list[int]] = {str(number): [] for number in range(len(sizes))}
    for chunk in layout.chunks:
        for part in chunk.parts:
            assert chunk.start + part.offset == layout.offsets[part.name] + part.start
            assert 0 < part.count <= chunk.count - part.offset
            seen[part.name] += range(part.start, part.start + part.count)
    assert [seen[str(number)] for number in range(len(sizes))] == [
        list(range(size)) for size in sizes
    ]


@given(SIZES, st.integers(1, 4))
def test_chunks_tile_the_space_and_parts_begin_at_units(sizes: list[int], units: int) -> None:
    layout = laid_out(sizes, units)
    ends = [0, *(chunk.start + chunk.count for chunk in layout.chunks)]
    assert [chunk.start for chunk in layout.chunks] == ends[:-1]
    assert ends[-1] == layout.num_elements
    assert all(0 < chunk.count <= units * UNIT for chunk in layout.chunks)
    for chunk in layout.chunks:
        assert all(part.offset % UNIT == part.start % UNIT == 0 for part in chunk.parts)


@given(SIZES)
def test_tensors_do_not_overlap(sizes: list[int]) -> None:
    layout = laid_out(sizes, 2)
    starts = list(layout.offsets.values())
    assert all(
        start + size <= after for (start, after), size in zip(pairwise(starts), sizes, strict=False)
    )


@pytest.mark.parametrize("size", [4 * UNIT, 4 * UNIT - 1])
def test_a_full_chunk_is_followed_by_no_empty_one(size: int) -> None:
    assert len(laid_out([size], 2).chunks) == 2
    assert len(laid_out([size, 1], 2).chunks) == 3
