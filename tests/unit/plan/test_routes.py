"""Routes against the plan that they stand for, move by move."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.mesh.split import Placement, RoleSplit, plan_split
from spmd_rl.model.low_precision.coded_weights import WeightFormat, coded_shapes
from spmd_rl.plan.routes import Wanted, push_routes, routes_of_experts, whole
from spmd_rl.types.code_layout import LAYOUTS
from spmd_rl.weights.plan.layout import (
    Box,
    Dims,
    Layout,
    Piece,
    chunk_box,
    chunk_of_box,
    range_box,
)
from spmd_rl.weights.plan.moves import bucket_bytes, plan_moves
from tests.specs import dense_spec, with_experts

Pairs = Counter[tuple[int, int]]
Case = tuple[int, Placement, Placement, dict[Dims, int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A trainer on some ranks of a world, an engine on some, overlapping or not; tensors of few
    rows or many.
    """
    world_size = draw(st.integers(1, 9))
    train = _placement("train", world_size, draw)
    infer = _placement("infer", world_size, draw)
    shapes = st.lists(st.integers(1, 20), min_size=1, max_size=2).map(tuple)
    return (
        world_size,
        train,
        infer,
        draw(st.dictionaries(shapes, st.integers(1, 3), min_size=1, max_size=3)),
    )


def _placement(name: str, world_size: int, draw: st.DrawFn) -> Placement:
    first, last = sorted(draw(st.tuples(*[st.integers(0, world_size - 1)] * 2)))
    num_ranks = last - first + 1
    fsdp = draw(
        st.sampled_from([size for size in range(1, num_ranks + 1) if num_ranks % size == 0])
    )
    return Placement(
        name, tuple(range(first, last + 1)), {"dp": num_ranks // fsdp, "fsdp": fsdp, "tp": 1}
    )


def by_every_move(train: Placement, infer: Placement, tensors: dict[Dims, int]) -> Pairs:
    num_shards = train.axes["fsdp"]
    moved: Pairs = Counter()
    for shape, count in tensors.items():
        whole = Piece("any", shape, "bfloat16", Box((0,) * len(shape), shape))
        shards = [
            Piece("any", shape, "float32", chunk_box(shape, part, num_shards))
            for part in range(num_shards)
        ]
        source = [
            Layout(rank, (shards[seat % num_shards],)) for seat, rank in enumerate(train.ranks)
        ]
        destination = [Layout(rank, (whole,)) for rank in infer.ranks]
        for rank in infer.ranks:
            for move in plan_moves(source, destination, None, rank).moves:
                if move.dst == rank:
                    moved[move.src, rank] += move.num_bytes * count
    return moved


def wholes(tensors: dict[Dims, int]) -> dict[Wanted, int]:
    return {whole(shape): count for shape, count in tensors.items()}


@pytest.mark.parametrize(
    "boxes",
    [
        (Box((0, 0), (3, 6)), Box((3, 0), (2, 6))),
        (Box((0, 0), (5, 3)), Box((0, 3), (5, 3))),
    ],
    ids=["rows", "columns"],
)
def test_ranks_of_an_engine_get_their_parts(boxes: tuple[Box, Box]) -> None:
    """Of the rows of three shards, two engines of two ranks each."""
    train = Placement("train", (1, 2, 3), {"dp": 1, "fsdp": 3, "tp": 1})
    infer = Placement("infer", (0, 1, 2, 3), {"dp": 1, "fsdp": 2, "tp": 2})
    shape = (5, 6)
    found = push_routes(train, infer, {Wanted(shape, boxes): 7}, "bfloat16", 4)
    source = [
        Layout(rank, (Piece("any", shape, "float32", chunk_box(shape, part, 3)),))
        for part, rank in enumerate(train.ranks)
    ]
    destination = [
        Layout(rank, (Piece("any", shape, "bfloat16", boxes[rank % 2]),)) for rank in infer.ranks
    ]
    moved: Pairs = Counter()
    for rank in infer.ranks:
        for move in plan_moves(source, destination, None, rank).moves:
            if move.dst == rank:
                moved[move.src, rank] += move.num_bytes * 7
    assert {pair: found[pair] for pair in found} == moved


def _cut(shape: Dims, dim: int | None, num_parts: int) -> tuple[Box, ...]:
    """The boxes of ranks that share a tensor along `dim`; None: each has all of it."""
    if dim is None:
        return (range_box(shape, 0, 0, shape[0]),)
    size = -(-shape[dim] // num_parts)
    parts = range(num_parts)
    return tuple(range_box(shape, dim, part * size, (part + 1) * size) for part in parts)


@given(
    dp=st.sampled_from([1, 2]),
    fsdp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([2, 4]),
    taken=st.sampled_from([1, 2, 4]),
    first=st.integers(0, 8),
    shape=st.tuples(st.integers(4, 20), st.integers(4, 20)),
    dim=st.sampled_from([None, 0, 1]),
)
def test_trainers_that_share_matrices_give_their_parts(
    dp: int, fsdp: int, tp: int, taken: int, first: int, shape: Dims, dim: int | None
) -> None:
    size = dp * fsdp * tp
    train = Placement("train", tuple(range(size)), {"dp": dp, "fsdp": fsdp, "tp": tp})
    ranks = tuple(range(first, first + 2 * taken))
    infer = Placement("infer", ranks, {"dp": 1, "fsdp": 2, "tp": taken})
    given, wanted = _cut(shape, dim, tp), _cut(shape, dim, taken)
    world_size = max(size, ranks[-1] + 1)
    kind = Wanted(shape, wanted, given)
    found = push_routes(train, infer, {kind: 3}, "bfloat16", world_size)
    source = []
    for rank in train.ranks:
        box = chunk_of_box(given[rank % tp % len(given)], rank // tp % fsdp, fsdp)
        source.append(Layout(rank, (Piece("any", shape, "float32", box),)))
    destination = [
        Layout(rank, (Piece("any", shape, "bfloat16", wanted[seat % len(wanted)]),))
        for seat, rank in enumerate(infer.ranks)
    ]
    moved: Pairs = Counter()
    for rank in infer.ranks:
        for move in plan_moves(source, destination, None, rank).moves:
            if move.dst == rank:
                moved[move.src, rank] += move.num_bytes * 3
    assert {pair: found[pair] for pair in found} == moved


@given(cases())
def test_routes_are_those_of_the_plan(case: Case) -> None:
    world_size, train, infer, tensors = case
    found = push_routes(train, infer, wholes(tensors), "bfloat16", world_size)
    expected = by_every_move(train, infer, tensors)
    assert {pair: found[pair] for pair in found} == expected
    assert len(found) == len(expected)
    assert found.within_bytes == sum(
        size for (source, target), size in expected.items() if source == target
    )
    assert found.within_bytes + found.between_bytes == expected.total()


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (1, 2), (1, 4), (2, 2), (4, 2)])
@pytest.mark.parametrize(("ranks", "taken"), [("0-3", 1), ("4-6", 1), ("2-5", 2), ("0-3", 4)])
@pytest.mark.parametrize("weights", ["full", "e4m3", "int4"])
def test_experts_go_from_ranks_that_have_them_to_those_that_want_them(
    dp: int, ep: int, ranks: str, taken: int, weights: WeightFormat
) -> None:
    dense = dense_spec(
        "qwen3", vocab=50, hidden=32, inner=20, layers=2, heads=(4, 2, 8), positions=64
    )
    spec = with_experts(dense, 8, 2, 21)
    split = {"train": RoleSplit("0-3", dp=dp, ep=ep), "infer": RoleSplit(ranks, ep=taken)}
    train, infer = plan_split(split, 7).values()
    found = routes_of_experts(train, infer, spec, "bfloat16", 7, weights)
    coded, layout = coded_shapes(spec, weights), LAYOUTS.get(weights)
    given, taken_as = (
        {
            name: layout.code_dtype if layout and name in coded else other
            for name in spec.parameter_shapes()
        }
        for other in ("float32", "bfloat16")
    )
    shapes, parts = dict(spec.parameter_shapes()), spec.expert_parts(ep)
    if layout is not None:
        shapes |= {name: layout.code_shape(shape) for name, shape in coded.items()}
    wanting = spec.expert_parts(taken)
    wanted = [
        tuple(
            Piece(name, shape, taken_as[name], Box((0,) * len(shape), shape))
            for name, shape in shapes.items()
            if wanting.get(name, part) == part
        )
        for part in range(taken)
    ]
    source = []
    for seat, rank in enumerate(train.ranks):
        own = [name for name in shapes if parts.get(name, seat % ep) == seat % ep]
        of_expert, of_other = (seat // ep, 4 // ep), (seat % (4 // dp), 4 // dp)
        boxes = {
            name: chunk_box(shapes[name], *(of_expert if name in parts else of_other))
            for name in own
        }
        pieces = (Piece(name, shapes[name], given[name], box) for name, box in boxes.items())
        source.append(Layout(rank, tuple(pieces)))
    destination = [Layout(rank, wanted[seat % taken]) for seat, rank in enumerate(infer.ranks)]
    moved: Pairs = Counter()
    for rank in infer.ranks:
        for move in plan_moves(source, destination, None, rank).moves:
            if move.dst == rank:
                moved[move.src, rank] += move.num_bytes
    assert {pair: found[pair] for pair in found} == moved


@given(cases(), st.integers(1, 10**8))
def test_what_a_rank_packs_and_whom_it_meets(case: Case, scale: int) -> None:
    """Buckets end at their bound, so tensors are made `scale` times as many."""
    world_size, train, infer, tensors = case
    tensors = {shape: count * scale for shape, count in tensors.items()}
    found = push_routes(train, infer, wholes(tensors), "bfloat16", world_size)
    moved = by_every_move(train, infer, tensors)
    for rank in range(world_size):
        crossing = {
            pair: size for pair, size in moved.items() if rank in pair and pair != (rank, rank)
        }
        of_peer = 2 * bucket_bytes(train.size, infer.size)
        assert found.packed_bytes(rank) == sum(min(size, of_peer) for size in crossing.values())
        assert found.num_peers(rank) == len({other for pair in crossing for other in pair} - {rank})
