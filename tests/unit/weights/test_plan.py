from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import PlanError
from spmd_rl.weights.layout import ITEM_BYTES, Box, Dims, Layout, Piece, chunk_box
from spmd_rl.weights.plan import Plan, plan


def _grid(shape: Dims, parts: tuple[int, int], index: int) -> Box:
    """Cell `index` of a grid of chunks over the first two dims."""
    row, column = divmod(index, parts[1])
    a, b = chunk_box(shape[:1], row, parts[0]), chunk_box(shape[1:], column, parts[1])
    return Box(a.offset + b.offset, a.extent + b.extent)


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[Layout], list[Layout]]:
    """Two sides over some of eight ranks: each a grid of uneven chunks, some replicated, dims as small as 1."""
    shapes = {f"t{i}": draw(st.tuples(st.integers(1, 9), st.integers(1, 9))) for i in range(draw(st.integers(1, 3)))}

    def side(dtype: str) -> list[Layout]:
        parts = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
        cells = parts[0] * parts[1]
        ranks = draw(st.permutations(range(8)))[: cells * draw(st.integers(1, 8 // cells))]
        names = draw(st.permutations(sorted(shapes)))
        return [
            Layout(rank, tuple(Piece(n, shapes[n], dtype, _grid(shapes[n], parts, seat % cells)) for n in names))
            for seat, rank in enumerate(ranks)
        ]

    return side("float32"), side("bfloat16")


def _writes(made: Plan, dst: list[Layout]) -> dict[tuple[int, str], np.ndarray]:
    """How often each element of each tensor is written on each destination rank."""
    count = {(layout.rank, piece.name): np.zeros(piece.shape, int) for layout in dst for piece in layout.pieces}
    for move in made.moves:
        count[move.dst, move.name][tuple(slice(o, e) for o, e in zip(move.box.offset, move.box.end, strict=True))] += 1
    return count


@given(sides())
def test_every_destination_element_is_written_once_and_no_other(pair: tuple[list[Layout], list[Layout]]) -> None:
    src, dst = pair
    count = _writes(plan(src, dst), dst)
    for layout in dst:
        for piece in layout.pieces:
            wanted = np.zeros(piece.shape, int)
            wanted[tuple(slice(o, e) for o, e in zip(piece.box.offset, piece.box.end, strict=True))] = 1
            np.testing.assert_array_equal(count[layout.rank, piece.name], wanted)


@given(sides())
def test_sources_send_only_what_they_hold(pair: tuple[list[Layout], list[Layout]]) -> None:
    src, dst = pair
    held = {(layout.rank, piece.name): piece.box for layout in src for piece in layout.pieces}
    for move in plan(src, dst).moves:
        assert move.box.intersect(held[move.src, move.name]) == move.box


@given(sides())
def test_the_wire_carries_the_lower_bound(pair: tuple[list[Layout], list[Layout]]) -> None:
    """What a rank needs and does not hold itself must cross once; nothing else does."""
    src, dst = pair
    held = {(layout.rank, piece.name): piece.box for layout in src for piece in layout.pieces}
    bound = 0
    for layout in dst:
        for piece in layout.pieces:
            own = held.get((layout.rank, piece.name))
            common = piece.box.intersect(own) if own else None
            bound += piece.box.num_elements - (common.num_elements if common else 0)
    assert plan(src, dst).wire_bytes == bound * ITEM_BYTES["bfloat16"]


@given(sides(), st.randoms())
def test_the_order_of_the_input_changes_nothing(
    pair: tuple[list[Layout], list[Layout]], shuffle: random.Random
) -> None:
    def shuffled(side: list[Layout]) -> list[Layout]:
        mixed = [Layout(one.rank, tuple(shuffle.sample(one.pieces, len(one.pieces)))) for one in side]
        return shuffle.sample(mixed, len(mixed))

    assert plan(*map(shuffled, pair)).digest == plan(*pair).digest


def _whole(
    rank: int, dtype: str = "float32", shape: Dims = (8, 4), names: tuple[str, ...] = ("a", "b", "c", "d")
) -> Layout:
    return Layout(rank, tuple(Piece(name, shape, dtype, Box((0, 0), shape)) for name in names))


def test_replicas_share_the_load() -> None:
    sent: dict[int, int] = defaultdict(int)
    for move in plan([_whole(0), _whole(1)], [_whole(rank) for rank in (2, 3)]).moves:
        sent[move.src] += move.num_bytes
    assert sent[0] == sent[1]


def test_the_own_host_is_asked_first() -> None:
    made = plan([_whole(0), _whole(1)], [_whole(2), _whole(3)], nodes={0: 0, 2: 0, 1: 1, 3: 1})
    assert {(move.src, move.dst) for move in made.moves} == {(0, 2), (1, 3)}


def test_an_own_box_stays_at_home() -> None:
    made = plan([_whole(0), _whole(1)], [_whole(1, "bfloat16")])
    assert {(move.src, move.dst) for move in made.moves} == {(1, 1)}
    assert (made.wire_bytes, made.local_bytes) == (0, 4 * 32 * 2)


def test_digest_tells_plans_apart() -> None:
    digests = {plan([_whole(0)], [_whole(1, dtype)]).digest for dtype in ("float32", "bfloat16")}
    assert len(digests) == 2


def test_what_cannot_be_filled_is_named() -> None:
    with pytest.raises(PlanError, match="the engine holds tensor 'd', the trainer does not"):
        plan([_whole(0, names=("a",))], [_whole(1, names=("a", "d"))])
    with pytest.raises(PlanError, match="the trainer holds tensor 'z', the engine does not"):
        plan([_whole(0, names=("a", "z"))], [_whole(1, names=("a",))])
    with pytest.raises(PlanError, match=r"'a' has different shapes .*\(8, 4\), \(9, 4\)"):
        plan([_whole(0, names=("a",))], [_whole(1, names=("a",), shape=(9, 4))])
    half = Layout(0, (Piece("a", (8, 4), "float32", Box((0, 0), (4, 4))),))
    with pytest.raises(PlanError, match=r"no source rank holds rows \(4, 0\) .* 'a', which rank 1 needs"):
        plan([half], [_whole(1, names=("a",))])
