from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_rl.train import microbatch, shared_prefix
from spmd_rl.train.microbatch import (
    inverse_temperature,
    lay_out,
    num_micro_batches,
    split_sequences,
)
from tests.dist.train_case import make_batch

LENGTHS = st.lists(st.integers(1, 60), max_size=30)
CPU = torch.device("cpu")


@given(LENGTHS, st.integers(1, 200))
def test_the_budget_holds_and_a_longer_sequence_goes_alone(lengths: list[int], budget: int) -> None:
    for part in split_sequences(lengths, max(num_micro_batches(lengths, budget), 1)):
        assert sum(lengths[i] for i in part) <= max(budget, max(lengths, default=0))


@given(LENGTHS, st.integers(60, 200))
@example([5, 5, 5, 5, 56], 60)  # equal ones beside a long one
def test_few_micro_batches_are_made(lengths: list[int], budget: int) -> None:
    """Balanced parts that overflow the budget mean that little room is left: never more than twice
    the least.
    """
    assert num_micro_batches(lengths, budget) <= 2 * -(-sum(lengths) // budget)


def test_few_partitions_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a little more than half the budget do not fit in pairs."""
    tried, whole = [], microbatch.balanced_partition

    def counted(lengths: list[int], count: int) -> list[list[int]]:
        tried.append(count)
        return whole(lengths, count)

    monkeypatch.setattr(microbatch, "balanced_partition", counted)
    lengths = [51 + i % 3 for i in range(200)]
    assert num_micro_batches(lengths, 100) == 200
    assert len(tried) <= 2 * 8 + 1


def test_no_sequences_need_none() -> None:
    assert num_micro_batches([], 100) == 0


@given(LENGTHS, st.integers(1, 40))
def test_any_agreed_count_can_be_run(lengths: list[int], count: int) -> None:
    parts = split_sequences(lengths, count)
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    full = [bool(part) for part in parts]
    assert full == sorted(full, reverse=True)


def test_rows_point_at_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    sharing = lay_out(batch, CPU)
    monkeypatch.setattr("spmd_rl.train.shared_prefix.pack_shared", shared_prefix.pack_whole)
    micro = lay_out(batch, CPU)
    assert len(sharing.tokens) < len(micro.tokens)
    for field in ("tokens", "positions"):
        one, other = getattr(sharing, field), getattr(micro, field)
        assert torch.equal(one[sharing.rows], other[micro.rows])
    assert torch.equal(sharing.targets, micro.targets)
    assert micro.num_scored == batch.mask.sum()
    assert torch.equal(micro.tokens[micro.rows + 1], micro.targets)
    assert torch.equal(micro.sequence, micro.sequence.sort().values)
    starts = np.cumsum(batch.lengths) - batch.lengths
    assert micro.positions[starts].eq(0).all()
    assert micro.positions.max() == batch.lengths.max() - 1
    inverse = inverse_temperature(batch.temperature)
    np.testing.assert_array_equal(micro.inv_temperature.numpy(), inverse[micro.sequence.numpy()])


def test_nothing_to_run_is_one_token_and_an_empty_mask() -> None:
    micro = lay_out(make_batch().select([]), CPU)
    assert (len(micro.tokens), micro.lengths.tolist(), micro.num_scored) == (1, [1], 0)


def test_greedy_samples_are_scored_at_one() -> None:
    temperature = np.array([0.0, 1.0, 0.7], np.float32)
    assert inverse_temperature(temperature).tolist() == [
        1.0,
        1.0,
        float(np.float32(1) / np.float32(0.7)),
    ]
