from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.types.partition import balanced_partition

WEIGHTS = st.lists(st.integers(1, 500), max_size=40)


@given(WEIGHTS, st.integers(1, 9))
def test_every_item_is_in_exactly_one_part(weights: list[int], num_parts: int) -> None:
    parts = balanced_partition(weights, num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(weights)))


@given(WEIGHTS, st.integers(1, 9))
def test_parts_differ_by_at_most_the_heaviest_item(weights: list[int], num_parts: int) -> None:
    totals = [sum(weights[i] for i in part) for part in balanced_partition(weights, num_parts)]
    assert max(totals) - min(totals) <= max(weights, default=0)


@given(WEIGHTS, st.integers(1, 9))
def test_a_part_is_empty_only_when_items_are_too_few(weights: list[int], num_parts: int) -> None:
    assert sum(bool(part) for part in balanced_partition(weights, num_parts)) == min(
        num_parts, len(weights)
    )


def test_the_classic_example_of_differencing() -> None:
    # 8 7 6 5 4: greedy ends with a difference of 4, differencing with 2.
    weights = [8, 7, 6, 5, 4]
    totals = sorted(sum(weights[i] for i in part) for part in balanced_partition(weights, 2))
    assert totals == [14, 16]


def test_equal_weights_give_equal_counts() -> None:
    assert sorted(len(part) for part in balanced_partition([3] * 12, 4)) == [3, 3, 3, 3]


def test_equal_weights_make_up_for_a_heavy_one() -> None:
    totals = sorted(
        sum([5, 5, 5, 5, 56][i] for i in part) for part in balanced_partition([5, 5, 5, 5, 56], 4)
    )
    assert totals == [5, 5, 10, 56]


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(1, 5))
def test_every_part_gets_as_many_of_each_weight(weights: list[int], num_parts: int) -> None:
    repeated = weights * num_parts
    parts = [
        sorted(repeated[item] for item in part) for part in balanced_partition(repeated, num_parts)
    ]
    assert parts == [sorted(weights)] * num_parts


def test_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        balanced_partition([1, 2], 0)
