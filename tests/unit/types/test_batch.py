"""Columns of a batch, and units of sequences that stay together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import ContractError
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues


def make(lengths: list[int], **given: Any) -> Batch:
    num_tokens = sum(lengths)
    numbers = np.arange(num_tokens, dtype=np.float32)
    return Batch(
        tokens=numbers.astype(np.int32),
        lengths=np.array(lengths, np.int32),
        mask=np.ones(num_tokens, np.bool_),
        weight=numbers,
        advantages=numbers,
        rollout_logprobs=numbers,
        versions=numbers.astype(np.int32),
        temperature=np.ones(len(lengths), np.float32),
        index=np.arange(len(lengths), dtype=np.int32),
        denominator=1.0,
        **given,
    )


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 4))
def test_columns_and_kept_sets_follow_their_sequences(lengths: list[int], shards: int) -> None:
    batch = make(lengths, kept=[np.array([number], np.uint8) for number in range(len(lengths))])
    pairs = np.stack([batch.tokens, -batch.tokens], axis=1)
    batch = batch.with_columns(mine=batch.weight + 1, pairs=pairs)
    for shard in batch.shard(shards):
        np.testing.assert_array_equal(shard.columns["mine"], shard.weight + 1)
        np.testing.assert_array_equal(shard.columns["pairs"][:, 1], -shard.tokens)
        assert [kept.tolist() for kept in shard.kept] == shard.index[:, None].tolist()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_units_are_never_split(sizes: list[int], shards: int) -> None:
    lengths = [size + more for size in sizes for more in (0, 3)]
    parts = replace(make(lengths), unit=2).shard(shards)
    assert sorted(number for part in parts for number in part.index) == list(range(len(lengths)))
    for part in parts:
        pairs = part.index.reshape(-1, 2)
        assert (pairs[:, 0] % 2 == 0).all()
        assert (pairs[:, 1] == pairs[:, 0] + 1).all()
        assert part.unit == 2


def test_what_a_role_returned_is_a_column() -> None:
    batch = make([2, 3])
    values = TokenValues(batch.weight * 2, batch.lengths, batch.index)
    np.testing.assert_array_equal(batch.with_columns(v=values).columns["v"], batch.weight * 2)


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (np.zeros(4, np.float32), r"has the shape \[4\]: expected a row for each of the batch's 5"),
        (np.zeros((5, 1, 1), np.float32), r"has the shape \[5, 1, 1\]"),
        (np.zeros(5), "'mine' is float64: expected float32 or int32"),
    ],
)
def test_a_column_of_another_shape_or_dtype_is_refused(column: Any, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        make([2, 3]).with_columns(mine=column)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_shards_of_a_fixed_number_of_parts_have_them_in_turn(
    lengths: list[int], ranks: int, unit: int
) -> None:
    batch = make(lengths * unit, unit=unit)
    expected = [part.index.tolist() for part in batch.shard(4)]
    shards = batch.shard(ranks, 4)
    found = [[part.index.tolist() for part in shard.parts()] for shard in shards]
    assert found == [expected[rank::ranks] for rank in range(ranks)]
    for shard in shards:
        tokens = np.concatenate([part.tokens for part in shard.parts()])
        assert tokens.tolist() == shard.tokens.tolist()
        assert all(part.unit == unit and part.parts() == [part] for part in shard.parts())
