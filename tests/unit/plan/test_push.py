"""Pushes as placements show them, beside the plan of moves that a run makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.mesh.split import Placement, Placements, RoleSplit, plan_split
from spmd_rl.model.formats import FORMATS, WeightFormat
from spmd_rl.model.formats.coded_weights import coded_shapes
from spmd_rl.model.spec import ModelSpec
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.plan.push import Push, push_of_run
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.weights.plan.layout import Box, Dims, Layout, Piece, chunk_box, chunk_of_box
from spmd_rl.weights.plan.moves import bucket_bytes, plan_moves
from tests.specs import dense_spec, with_experts

Pairs = Counter[tuple[int, int]]
HOSTS = {rank: rank // 3 for rank in range(24)}


def tiny_spec() -> ModelSpec:
    return dense_spec(
        "qwen3", vocab=50, hidden=32, inner=20, layers=2, heads=(4, 2, 8), positions=64
    )


def pushed(
    train: Placement, infer: Placement, spec: ModelSpec, weights: WeightFormat = "full"
) -> Push:
    """What the plan says of a push of FSDP2 to native engines in bfloat16."""
    trainer = TrainerConfig(backend=Fsdp2Config(), weights=weights)
    engine = NativeEngineConfig(dtype="bfloat16", weights=weights)
    needs = RunNeeds(trainer=trainer, engine=engine)
    found = push_of_run(Placements(train=train, infer=infer), spec, needs)
    assert found is not None
    return found


def check(found: Push, source: Sequence[Layout], wanted: Sequence[Layout], is_exact: bool) -> None:
    """Compare with each rank's own moves: all peers and bytes are counted, and with `is_exact` no
    others.
    """
    limit = 2 * bucket_bytes(len(source), len(wanted))
    for rank in sorted({one.rank for one in (*source, *wanted)}):
        plan = plan_moves(source, wanted, HOSTS, rank)
        moved: Pairs = Counter()
        for move in plan.moves:
            if move.src != move.dst:
                moved[move.src, move.dst] += move.num_bytes
        compared = {(move.src, move.dst) for move in plan.replicas}
        peers = {other for pair in moved.keys() | compared for other in pair} - {rank}
        counted = found.peers(rank)
        assert set(counted.ranks) >= peers
        packed = sum(min(size, limit) for size in moved.values())
        assert packed <= found.packed_bytes(rank)
        if is_exact:
            assert counted.num_peers == len(peers)
            assert found.num_sends(rank) == sum(source == rank for source, _ in moved)
            assert found.num_receives(rank) == sum(target == rank for _, target in moved)
        else:
            assert counted.num_peers >= len(peers)


def layouts(
    ranks: Sequence[int], pieces: Sequence[dict[str, tuple[Dims, Box]]], dtype: str
) -> list[Layout]:
    """The pieces of each rank, by name."""
    return [
        Layout(rank, tuple(Piece(name, *one[:1], dtype, one[1]) for name, one in of_rank.items()))
        for rank, of_rank in zip(ranks, pieces, strict=True)
    ]


def whole(shape: Dims) -> Box:
    return Box((0,) * len(shape), shape)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, Placement]:
    """A trainer on some ranks of a world, an engine on some, overlapping or not."""
    world_size = draw(st.integers(1, 9))
    return _placement("train", world_size, draw), _placement("infer", world_size, draw)


def _placement(name: str, world_size: int, draw: st.DrawFn) -> Placement:
    first, last = sorted(draw(st.tuples(*[st.integers(0, world_size - 1)] * 2)))
    num_ranks = last - first + 1
    fsdp = draw(
        st.sampled_from([size for size in range(1, num_ranks + 1) if num_ranks % size == 0])
    )
    ranks = tuple(range(first, last + 1))
    return Placement(name, ranks, {"dp": num_ranks // fsdp, "fsdp": fsdp, "tp": 1})


@given(placements())
def test_ranks_meet_those_with_shards_that_they_lack(ends: tuple[Placement, Placement]) -> None:
    train, infer = ends
    spec, fsdp = tiny_spec(), train.axes["fsdp"]
    shapes = spec.parameter_shapes()
    held = [
        {name: (shape, chunk_box(shape, seat % fsdp, fsdp)) for name, shape in shapes.items()}
        for seat in range(train.size)
    ]
    wanted = [{name: (shape, whole(shape)) for name, shape in shapes.items()}] * infer.size
    found = pushed(train, infer, spec)
    source, sink = layouts(train.ranks, held, "float32"), layouts(infer.ranks, wanted, "bfloat16")
    check(found, source, sink, is_exact=train.axes["dp"] == 1)
    assert found.copy_bytes == 2 * spec.num_parameters


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("given_tp", "taken_tp"), [(2, 1), (2, 2), (4, 2), (1, 4)])
@pytest.mark.parametrize("first", [0, 2, 8])
def test_ranks_that_share_matrices_meet_no_more(
    dp: int, given_tp: int, taken_tp: int, first: int
) -> None:
    """Some tensors are cut along tp, and all ranks along it have copies of others."""
    train = Placement(
        "train", tuple(range(8)), {"dp": dp, "fsdp": 8 // dp // given_tp, "tp": given_tp}
    )
    infer = Placement(
        "infer", tuple(range(first, first + 4)), {"dp": 1, "fsdp": 4 // taken_tp, "tp": taken_tp}
    )
    spec, fsdp = tiny_spec(), train.axes["fsdp"]

    def part(shape: Dims, seat: int, tp: int) -> Box:
        if len(shape) < 2 or shape[0] % tp:
            return whole(shape)
        rows = shape[0] // tp
        return Box((rows * (seat % tp), 0), (rows, shape[1]))

    shapes = spec.parameter_shapes()
    held = [
        {
            name: (shape, chunk_of_box(part(shape, seat, given_tp), seat // given_tp % fsdp, fsdp))
            for name, shape in shapes.items()
        }
        for seat in range(train.size)
    ]
    wanted = [
        {name: (shape, part(shape, seat, taken_tp)) for name, shape in shapes.items()}
        for seat in range(infer.size)
    ]
    source, sink = layouts(train.ranks, held, "float32"), layouts(infer.ranks, wanted, "bfloat16")
    check(pushed(train, infer, spec), source, sink, is_exact=False)


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (1, 2), (1, 4), (2, 2), (4, 2)])
@pytest.mark.parametrize(("ranks", "taken"), [("0-3", 1), ("4-6", 1), ("2-5", 2), ("0-3", 4)])
@pytest.mark.parametrize("weights", ["full", "e4m3", "int4"])
def test_ranks_that_share_experts_meet_no_more(
    dp: int, ep: int, ranks: str, taken: int, weights: WeightFormat
) -> None:
    spec = with_experts(tiny_spec(), 8, 2, 21)
    split = {"train": RoleSplit("0-3", dp=dp, ep=ep), "infer": RoleSplit(ranks, ep=taken)}
    train, infer = plan_split(split, 7).values()
    coded, layout = coded_shapes(spec, weights), FORMATS.get(weights)
    shapes, parts, wanting = (
        dict(spec.parameter_shapes()),
        spec.expert_parts(ep),
        spec.expert_parts(taken),
    )
    if layout is not None:
        shapes |= {name: layout.code_shape(shape) for name, shape in coded.items()}

    def pieces(rank: int, names: Sequence[str], boxes: dict[str, Box], dtype: str) -> Layout:
        def dtype_of(name: str) -> str:
            return layout.code_dtype if layout and name in coded else dtype

        found = (Piece(name, shapes[name], dtype_of(name), boxes[name]) for name in names)
        return Layout(rank, tuple(found))

    source = []
    for seat, rank in enumerate(train.ranks):
        of_expert, of_other = (seat // ep, 4 // ep), (seat % (4 // dp), 4 // dp)
        boxes = {
            name: chunk_box(shape, *(of_expert if name in parts else of_other))
            for name, shape in shapes.items()
        }
        own = [name for name in shapes if parts.get(name, seat % ep) == seat % ep]
        source.append(pieces(rank, own, boxes, "float32"))
    wholes = {name: whole(shape) for name, shape in shapes.items()}
    sink = [
        pieces(
            rank,
            [name for name in shapes if wanting.get(name, seat % taken) == seat % taken],
            wholes,
            "bfloat16",
        )
        for seat, rank in enumerate(infer.ranks)
    ]
    check(pushed(train, infer, spec, weights), source, sink, is_exact=False)
