"""Weight plans: every element arrives once, from a rank that holds it."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import PlanError
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box, Dims, Layout, Piece, chunk_box
from spmd_rl.weights.plan.moves import Move, WeightPlan, bucket_bytes, plan_moves


def _grid(shape: Dims, parts: tuple[int, int], index: int) -> Box:
    """Cell `index` of a grid of chunks over the first two dims."""
    row, column = divmod(index, parts[1])
    a, b = chunk_box(shape[:1], row, parts[0]), chunk_box(shape[1:], column, parts[1])
    return Box(a.offset + b.offset, a.extent + b.extent)


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[Layout], list[Layout]]:
    """Two sides over some of eight ranks: each a grid of uneven chunks, dims as small as 1. Ranks
    hold several cells of it where there are fewer ranks, and the same ones where there are more.
    """
    shapes = {
        f"t{i}": draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        for i in range(draw(st.integers(1, 3)))
    }

    def side(dtype: str) -> list[Layout]:
        parts = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
        cells = parts[0] * parts[1]
        ranks = draw(st.permutations(range(8)))[: draw(st.integers(1, 8))]
        names = draw(st.permutations(sorted(shapes)))
        cells_of = {rank: [index % cells] for index, rank in enumerate(ranks)}
        for cell in range(len(ranks), cells):
            cells_of[ranks[cell % len(ranks)]].append(cell)
        return [
            Layout(
                rank,
                tuple(
                    Piece(n, shapes[n], dtype, _grid(shapes[n], parts, cell))
                    for n in names
                    for cell in own_cells
                ),
            )
            for rank, own_cells in cells_of.items()
        ]

    return side("float32"), side("bfloat16")


def plans(
    src: list[Layout], dst: list[Layout], nodes: dict[int, int] | None = None
) -> dict[int, WeightPlan]:
    """Return the plan of every rank."""
    return {
        rank: plan_moves(src, dst, nodes, rank) for rank in {layout.rank for layout in [*src, *dst]}
    }


def received(plans_by_rank: dict[int, WeightPlan]) -> list[Move]:
    """Return all moves, each from the plan of the rank that receives it."""
    return [move for rank, plan in plans_by_rank.items() for move in plan.moves if move.dst == rank]


def _writes(moves: list[Move], dst: list[Layout]) -> dict[tuple[int, str], np.ndarray]:
    """Count how often each element of each tensor is written on each destination rank."""
    count = {
        (layout.rank, piece.name): np.zeros(piece.shape, int)
        for layout in dst
        for piece in layout.pieces
    }
    for move in moves:
        count[move.dst, move.name][
            tuple(slice(o, e) for o, e in zip(move.box.offset, move.box.end, strict=True))
        ] += 1
    return count


def _boxes(side: list[Layout]) -> dict[tuple[int, str], list[Box]]:
    """The boxes of each tensor on each rank."""
    boxes: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for layout in side:
        for piece in layout.pieces:
            boxes[layout.rank, piece.name].append(piece.box)
    return boxes


@given(sides())
def test_every_destination_element_is_written_once_and_no_other(
    pair: tuple[list[Layout], list[Layout]],
) -> None:
    src, dst = pair
    count = _writes(received(plans(src, dst)), dst)
    for layout in dst:
        wanted = {piece.name: np.zeros(piece.shape, int) for piece in layout.pieces}
        for piece in layout.pieces:
            box = piece.box
            wanted[piece.name][
                tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            ] = 1
        for name, of_name in wanted.items():
            np.testing.assert_array_equal(count[layout.rank, name], of_name)


@given(sides())
def test_sources_send_only_what_they_hold(pair: tuple[list[Layout], list[Layout]]) -> None:
    src, dst = pair
    source_boxes, pieces = _boxes(src), _boxes(dst)
    for move in received(plans(src, dst)):
        assert any(move.box.intersect(box) == move.box for box in source_boxes[move.src, move.name])
        assert move.into in pieces[move.dst, move.name]
        assert move.box.intersect(move.into) == move.box


@given(sides(), st.dictionaries(st.integers(0, 7), st.integers(0, 2)))
def test_both_ends_of_a_pair_know_the_same_moves_in_the_same_order(
    pair: tuple[list[Layout], list[Layout]], nodes: dict[int, int]
) -> None:
    plans_by_rank = plans(*pair, nodes)
    for src, dst in itertools.permutations(plans_by_rank, 2):
        sent, got = (
            [move for move in plans_by_rank[end].moves if (move.src, move.dst) == (src, dst)]
            for end in (src, dst)
        )
        assert sent == got
    assert all(
        rank in (move.src, move.dst) for rank, plan in plans_by_rank.items() for move in plan.moves
    )


@given(sides())
def test_the_wire_carries_the_lower_bound(pair: tuple[list[Layout], list[Layout]]) -> None:
    """The elements that a rank needs and does not hold cross once, and nothing else crosses."""
    src, dst = pair
    source_boxes = _boxes(src)
    bound = 0
    for layout in dst:
        for piece in layout.pieces:
            bound += piece.box.num_elements
            for own_box in set(source_boxes.get((layout.rank, piece.name), ())):
                common = piece.box.intersect(own_box)
                bound -= common.num_elements if common else 0
    plans_by_rank = plans(src, dst)
    crossing, staying = (
        sum(move.num_bytes for move in received(plans_by_rank) if (move.src != move.dst) is crosses)
        for crosses in (True, False)
    )
    assert crossing == bound * ITEM_BYTES["bfloat16"]
    assert {(plan.wire_bytes, plan.local_bytes) for plan in plans_by_rank.values()} == {
        (crossing, staying)
    }


@given(sides(), st.randoms())
def test_the_order_of_the_input_changes_nothing(
    pair: tuple[list[Layout], list[Layout]], shuffle: random.Random
) -> None:
    def shuffled(side: list[Layout]) -> list[Layout]:
        mixed = [
            Layout(layout.rank, tuple(shuffle.sample(layout.pieces, len(layout.pieces))))
            for layout in side
        ]
        return shuffle.sample(mixed, len(mixed))

    of_shuffled = plans(*map(shuffled, pair))
    assert of_shuffled == plans(*pair)
    assert len({plan.digest for plan in of_shuffled.values()}) == 1


@given(sides())
def test_replicas_take_turns(pair: tuple[list[Layout], list[Layout]]) -> None:
    """Of the ranks that hold a box, none sends it more than once more than another."""
    src, destinations = pair
    dst = [  # every destination wants every box
        Layout(
            one.rank, tuple({replace(piece, box=Box((0, 0), piece.shape)) for piece in one.pieces})
        )
        for one in destinations
    ]
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for layout in src:
        for piece in layout.pieces:
            holders[piece.name, piece.box].append(layout.rank)
    moves = received(plans(src, dst))
    for (name, box), ranks in holders.items():
        targets = {
            move.dst: move.src for move in moves if move.name == name and move.box.intersect(box)
        }
        sent = [
            sum(source == rank != target for target, source in targets.items()) for rank in ranks
        ]
        assert max(sent) - min(sent) <= 1


def _whole(
    rank: int,
    dtype: str = "float32",
    shape: Dims = (8, 4),
    names: tuple[str, ...] = ("a", "b", "c", "d"),
) -> Layout:
    return Layout(rank, tuple(Piece(name, shape, dtype, Box((0, 0), shape)) for name in names))


def test_replicas_share_the_load() -> None:
    plans_by_rank = plans([_whole(0), _whole(1)], [_whole(rank) for rank in (2, 3)])
    assert len(plans_by_rank[0].moves) == len(plans_by_rank[1].moves) == 4


def test_the_own_host_is_asked_first() -> None:
    plans_by_rank = plans(
        [_whole(0), _whole(1)], [_whole(3), _whole(2)], nodes={0: 1, 2: 0, 1: 0, 3: 1}
    )
    assert {(move.src, move.dst) for move in received(plans_by_rank)} == {(1, 2), (0, 3)}


def test_an_own_box_stays_at_home() -> None:
    plans_by_rank = plans([_whole(0), _whole(1)], [_whole(1, "bfloat16")])
    assert {(move.src, move.dst) for move in received(plans_by_rank)} == {(1, 1)}
    assert (plans_by_rank[0].wire_bytes, plans_by_rank[0].local_bytes) == (0, 4 * 32 * 2)
    assert not plans_by_rank[0].moves


def test_digest_tells_plans_apart() -> None:
    digests = {
        plan_moves([_whole(0)], [_whole(1, dtype)], None, 0).digest
        for dtype in ("float32", "bfloat16")
    }
    digests.add(plan_moves([_whole(0)], [_whole(1)], {0: 0, 1: 1}, 0).digest)
    assert len(digests) == 3


def test_what_cannot_be_filled_is_named() -> None:
    with pytest.raises(PlanError, match="the engine holds tensor 'd', the trainer does not"):
        plan_moves([_whole(0, names=("a",))], [_whole(1, names=("a", "d"))], None, 0)
    with pytest.raises(PlanError, match="the trainer holds tensor 'z', the engine does not"):
        plan_moves([_whole(0, names=("a", "z"))], [_whole(1, names=("a",))], None, 0)
    with pytest.raises(PlanError, match=r"'a' has different shapes .*\(8, 4\), \(9, 4\)"):
        plan_moves([_whole(0, names=("a",))], [_whole(1, names=("a",), shape=(9, 4))], None, 0)
    half = Layout(0, (Piece("a", (8, 4), "float32", Box((0, 0), (4, 4))),))
    with pytest.raises(
        PlanError, match=r"no source rank holds rows \(4, 0\) .* 'a', which rank 1 needs"
    ):
        plan_moves([half], [_whole(1, names=("a",))], None, 1)
    with pytest.raises(PlanError, match="parts of tensor 'a' that overlap and are not the same"):
        plan_moves([half, _whole(2, names=("a",))], [_whole(1, names=("a",))], None, 1)
    one_row_more = Layout(2, (Piece("a", (8, 4), "float32", Box((3, 0), (5, 4))),))
    with pytest.raises(PlanError, match="parts of tensor 'a' that overlap and are not the same"):
        plan_moves([half, one_row_more], [_whole(1, names=("a",))], None, 1)


def test_what_is_private_to_one_end_is_left_alone() -> None:
    source, wanted = _whole(0, names=("a", "z")), _whole(1, names=("a", "b"))
    private = [
        Layout(one.rank, tuple(replace(p, private=p.name != "a") for p in one.pieces))
        for one in (source, wanted)
    ]
    assert {move.name for move in plan_moves([private[0]], [private[1]], None, 1).moves} == {"a"}
    with pytest.raises(PlanError, match="the engine holds tensor 'b', the trainer does not"):
        plan_moves([private[0]], [wanted], None, 1)
    with pytest.raises(PlanError, match="the trainer holds tensor 'z', the engine does not"):
        plan_moves([source], [private[1]], None, 1)
    both = plan_moves([private[0]], [_whole(1, names=("a", "z"))], None, 1)
    assert {move.name for move in both.moves} == {"a", "z"}  # what both hold is pushed


def test_a_world_of_hundreds_is_planned_in_seconds() -> None:
    """A plan of all three million moves of this world, on every rank, would take minutes."""
    num_ranks, names = 256, tuple(f"w{index}" for index in range(50))
    rows = [chunk_box((4096, 64), part, num_ranks) for part in range(num_ranks)]
    source_boxes = [
        tuple(Piece(name, (4096, 64), "float32", box) for name in names) for box in rows
    ]
    src = [Layout(rank, pieces) for rank, pieces in enumerate(source_boxes)]
    dst = [_whole(rank, "bfloat16", (4096, 64), names) for rank in range(num_ranks)]
    began = time.process_time()
    weight_plan = plan_moves(src, dst, {rank: rank // 8 for rank in range(num_ranks)}, 17)
    assert time.process_time() - began < 20
    assert len(weight_plan.moves) == 2 * 255 * len(names) + len(names)


def test_a_round_of_all_peers_stays_as_large() -> None:
    sizes = {(1, 1): 256, (2, 2): 128, (4, 2): 64, (2, 4): 64, (64, 64): 4, (1000, 8): 4}
    assert {ends: bucket_bytes(*ends) >> 20 for ends in sizes} == sizes
