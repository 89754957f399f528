"""Who writes which box, and what an index must hold. No torch, no files."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import SpmdError
from spmd_rl.train.checkpoint.checkpoint_index import Shard, WrittenByRank, merged, share
from spmd_rl.train.checkpoint.trainer_state import TrainerState
from spmd_rl.weights.plan.layout import Box, Piece, chunk_box

SHAPE = (7, 3)


def layouts(num_shards: int, num_replicas: int, num_tensors: int) -> list[dict[str, list[Piece]]]:
    """Of ranks in replicas of equal shards, as FSDP2 cuts them."""
    return [
        {
            kind: [
                Piece(f"t{number}", SHAPE, "float32", chunk_box(SHAPE, shard, num_shards))
                for number in range(num_tensors)
            ]
            for kind in ("weights", "exp_avg")
        }
        for _ in range(num_replicas)
        for shard in range(num_shards)
    ]


def written(layouts: list[dict[str, list[Piece]]], rank: int) -> WrittenByRank:
    """As if the rank had written its share, to a file of its own."""
    file = f"rank-{rank}.safetensors"
    shards: dict[str, dict[str, list[Shard]]] = {}
    for kind, positions in share(layouts, rank).items():
        pieces = [layouts[rank][kind][position] for position in positions]
        shards[kind] = {one.name: [] for one in pieces}
        for number, one in enumerate(pieces):
            shards[kind][one.name].append(
                Shard(one.box.offset, one.box.extent, file, f"{one.name}@{number}")
            )
    return WrittenByRank({file: 0}, shards)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_each_box_is_written_once_and_replicas_share_the_work(
    shards: int, replicas: int, tensors: int
) -> None:
    """Also by more ranks than a tensor has rows, some of which hold nothing."""
    ours = layouts(shards, replicas, tensors)
    everyone = [written(ours, rank) for rank in range(len(ours))]
    index = merged(TrainerState(), {}, ours, everyone)
    assert index.problem() == ""
    assert {kind: set(named) for kind, named in index.tensors.items()} == {
        kind: {f"t{number}" for number in range(tensors)} for kind in ("weights", "exp_avg")
    }
    boxes = [
        [one for named in rank.shards.values() for shards in named.values() for one in shards]
        for rank in everyone
    ]
    busiest = max(map(len, boxes))
    assert busiest <= -(-2 * tensors // replicas) + 1


def test_a_rank_may_hold_several_boxes_of_a_tensor() -> None:
    ours = [
        {"weights": [Piece("t", (4, 2), "float32", Box((row, 0), (1, 2))) for row in rows]}
        for rows in ([0, 2], [1, 3])
    ]
    index = merged(TrainerState(), {}, ours, [written(ours, rank) for rank in range(2)])
    assert sorted((one.offset[0], one.file) for one in index.tensors["weights"]["t"].shards) == [
        (0, "rank-0.safetensors"),
        (1, "rank-1.safetensors"),
        (2, "rank-0.safetensors"),
        (3, "rank-1.safetensors"),
    ]


def test_an_index_of_ranks_that_left_something_out_is_not_made() -> None:
    ours = layouts(3, 1, 1)
    everyone = [written(ours, rank) for rank in range(3)]
    with pytest.raises(
        SpmdError, match=r"the ranks did not write whole tensors: weights of 't0' is not covered"
    ):
        merged(TrainerState(), {}, ours, [*everyone[:2], WrittenByRank()])


def test_boxes_that_overlap_in_part_are_seen() -> None:
    """The number of elements alone would not show it."""
    boxes = [Box((0, 0), (4, 2)), Box((3, 0), (4, 2))]
    ours = [{"weights": [Piece("t", (8, 2), "float32", box)]} for box in boxes]
    with pytest.raises(SpmdError, match="not covered by its shards once"):
        merged(TrainerState(), {}, ours, [written(ours, rank) for rank in range(2)])
    assert all(one.intersect(other) for one, other in pairwise(boxes))
