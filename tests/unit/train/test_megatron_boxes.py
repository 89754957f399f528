"""Flat ranges of a parameter as boxes, and which tokens a context-parallel rank has."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.model.families.rules import Joined
from spmd_rl.model.held.tensor import ONE, Along
from spmd_rl.model.layers.layer import Cut, TensorSpec
from spmd_rl.train.megatron.packing import deal_to_rank, held_positions, num_padded, pack_for_rank
from spmd_rl.train.megatron.parameters import Parameter, rectangles
from spmd_rl.train.microbatch import MicroBatch, lay_out, without_scores
from tests.dist.train_case import make_batch

CPU = torch.device("cpu")


@given(st.integers(1, 7), st.integers(1, 9), st.data())
def test_a_flat_range_is_its_rectangles_in_order(
    rows: int, columns: int, data: st.DataObject
) -> None:
    size = rows * columns
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(rows, columns)
    found = [
        whole[row : row + num_rows, column : column + num_columns].reshape(-1)
        for row, num_rows, column, num_columns in rectangles(start, stop, columns)
    ]
    assert len(found) <= 3
    joined = np.concatenate([np.zeros(0, int), *found])
    np.testing.assert_array_equal(joined, np.arange(start, stop))


@given(st.lists(st.integers(0, 40), min_size=0, max_size=4))
def test_ranges_of_a_fused_parameter_give_back_the_tensors(cuts: list[int]) -> None:
    """Two ranks of tp, and the parameter of each cut into flat ranges anywhere."""
    shapes = {"gate": (8, 5), "up": (8, 5)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    back = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for index in range(2):
        named = {name: TensorSpec(name, shape, Cut(0, 8, "rows")) for name, shape in shapes.items()}
        parts = list(Joined("gate", "up").parts(named, Along(index, 2)))
        rows = slice(4 * index, 4 * index + 4)
        memory = torch.cat([tensors["gate"][rows], tensors["up"][rows]]).reshape(-1)
        parameter = Parameter("fused", memory.view(8, 5), parts)
        bounds = [0, *sorted(cuts), 40]
        for start, stop in pairwise(bounds):
            for name, one in parameter.named(memory[start:stop], start):
                assert one.local.untyped_storage().data_ptr() == memory.data_ptr(), "a view"
                target = back[name][tuple(map(slice, one.box.offset, one.box.end))]
                assert target.isnan().all(), "an element came twice"
                target.copy_(one.local)
    assert all(torch.equal(back[name], tensors[name]) for name in shapes)


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([0, 50, 300]))
def test_each_scored_token_is_on_one_rank(cp: int, multiple: int, least: int) -> None:
    micro = lay_out(make_batch(), CPU, whole=True)
    packed = [pack_for_rank(micro, Along(index, cp), multiple, least) for index in range(cp)]
    scored = torch.cat([one.scored for one in packed])
    assert sorted(scored.tolist()) == list(range(micro.num_scored))
    for one in packed:
        assert len(one.tokens) % multiple == 0
        assert (
            len(one.tokens) * cp
            == one.lengths.sum()
            >= max(least, num_padded(micro, Along(size=cp)))
        )
        assert torch.equal(one.tokens[one.rows], micro.tokens[micro.rows[one.scored]])
        assert torch.equal(one.positions[one.rows], micro.positions[micro.rows[one.scored]])
        assert len({len(other.tokens) for other in packed}) == 1


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([0, 50, 300]))
def test_tokens_in_turn_leave_prompts_shared(cp: int, multiple: int, least: int) -> None:
    micro = lay_out(make_batch(), CPU)
    dealt = [deal_to_rank(micro, Along(index, cp), multiple, least) for index in range(cp)]
    num_tokens = sum(len(one.tokens) for one in dealt)
    assert num_tokens >= max(least, len(micro.tokens))
    whole = torch.stack([one.tokens for one in dealt], 1).flatten()
    assert torch.equal(whole[: len(micro.tokens)], micro.tokens)
    assert sorted(torch.cat([one.scored for one in dealt]).tolist()) == list(
        range(micro.num_scored)
    )
    for one in dealt:
        assert len(one.tokens) % multiple == 0
        assert one.lengths.sum() == num_tokens
        np.testing.assert_array_equal(one.prefixes[: len(micro.prefixes)], micro.prefixes)
        assert one.tokens.is_contiguous() and one.positions.is_contiguous(), "kernels read them so"
        assert torch.equal(one.tokens[one.rows], micro.tokens[micro.rows[one.scored]])
        assert torch.equal(one.positions[one.rows], micro.positions[micro.rows[one.scored]])


def test_ranks_of_a_sequence_have_equal_work() -> None:
    held = [held_positions(24, Along(index, 3)) for index in range(3)]
    assert sorted(np.concatenate(held).tolist()) == list(range(24))
    assert len({int((one + 1).sum()) for one in held}) == 1, "each attends to as many keys"


def test_shared_prompts_stay_shared_without_context_parallelism() -> None:
    micro = lay_out(make_batch(), CPU)
    assert (micro.prefixes >= 0).any()
    packed = pack_for_rank(micro, ONE, 1)
    assert torch.equal(packed.tokens, micro.tokens)
    np.testing.assert_array_equal(packed.prefixes, micro.prefixes)


def test_a_whole_micro_batch_is_not_copied() -> None:
    micro = lay_out(make_batch(), CPU)
    packed = pack_for_rank(micro, ONE, 1)
    names = ("tokens", "positions", "rows", "lengths", "prefixes")
    assert all(getattr(packed, name) is getattr(micro, name) for name in names)
    padded = pack_for_rank(micro, ONE, 1, len(micro.tokens) + 1)
    assert len(padded.tokens) == len(micro.tokens) + 1
    assert torch.equal(padded.rows, micro.rows) and torch.equal(padded.scored, packed.scored)


def test_an_empty_micro_batch_beside_another_has_its_fields() -> None:
    micro: MicroBatch = lay_out(make_batch(), CPU)
    micro = replace(micro, columns={"more": torch.zeros(micro.num_scored, 3)})
    empty = without_scores(micro)
    assert (len(empty.tokens), empty.num_scored) == (1, 0)
    assert empty.columns["more"].shape == (0, 3)
    assert {len(getattr(empty, name)) for name in ("weight", "versions", "targets")} == {0}
