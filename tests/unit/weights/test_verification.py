"""Every push proves itself: what differs is found and named, and what does not is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import alias, execute
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.perturbed_source import PerturbedSource
from spmd_rl.weights.proof.verdict import Verification
from spmd_rl.weights.proof.verification import MAX_NAMED, Verifier
from spmd_rl.weights.tensor_ends import TensorSource
from tests.unit.weights.ends_case import (
    PortionSink,
    ReadSource,
    ends_of,
    ends_over,
    part,
    plan_of,
    sink_of,
    whole,
)


def trainer() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (9, 6), "norm.weight": (6,), "scale": (), "up.weight": (8, 6)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def engine(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {name: torch.zeros_like(one, dtype=dtype) for name, one in trainer().items()}


def compared(ends: LocalEnds, *, push: bool = True) -> Verification:
    plan = plan_of(ends)
    if push:
        execute(plan.moves, ends, None)
    return Verifier(plan.moves, plan.replicas, ends).compare(None)


def counts(found: Verification) -> tuple[int, int, int, int]:
    return found.num_equal, found.num_unequal, found.num_shared, found.num_unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [TensorSource, ReadSource])
def test_a_push_that_arrived_is_equal(dtype: torch.dtype, source: type[TensorSource]) -> None:
    found = compared(ends_of(source(whole(trainer())), sink_of(whole(engine(dtype)))))
    assert counts(found) == (4, 0, 0, 0)
    assert found.smallest == "scale"
    assert found.seconds > 0


@pytest.mark.parametrize("name", trainer())
def test_a_flipped_byte_is_found_and_named(name: str) -> None:
    held = engine()
    ends = ends_over(trainer(), held)
    execute(plan_of(ends).moves, ends, None)
    held[name].view(-1)[-1:].view(torch.uint8)[0] ^= 0x10
    found = compared(ends, push=False)
    assert counts(found) == (3, 1, 0, 0)
    (mismatch,) = found.mismatches
    assert (mismatch.name, mismatch.rank, mismatch.sources) == (name, 0, [0])
    assert (mismatch.route, mismatch.is_replica) == ("copy", False)


def test_a_box_in_a_wrong_place_is_found() -> None:
    held = engine()
    ends = ends_over(trainer(), held)
    execute(plan_of(ends).moves, ends, None)
    held["up.weight"].copy_(held["up.weight"].roll(1, 0))
    assert [one.name for one in compared(ends, push=False).mismatches] == ["up.weight"]


def test_only_some_of_many_mismatches_are_described() -> None:
    names = {f"w.{i}": torch.ones(2) for i in range(MAX_NAMED + 3)}
    ends = ends_over(names, {name: torch.zeros(2) for name in names})
    found = compared(ends, push=False)
    assert found.num_unequal == len(names)
    assert len(found.mismatches) == MAX_NAMED


def test_shared_memory_is_not_compared() -> None:
    ends = ends_over(trainer(), engine(torch.float32))
    ends = replace(ends, shared=alias(ends.the_source(), ends.the_sink(), 0))
    found = compared(ends)
    assert counts(found) == (0, 0, 4, 0)
    assert found.smallest == ""


def test_what_a_sink_cannot_digest_is_unknown() -> None:
    class Opaque(PortionSink):
        def digest(self) -> dict[tuple[str, Box], int]:
            known = super().digest()
            return {key: value for key, value in known.items() if key[0] != "scale"}

    found = compared(ends_of(TensorSource(whole(trainer())), Opaque(engine(), 64)))
    assert counts(found) == (3, 0, 0, 1)
    assert found.smallest == "norm.weight"


def test_several_boxes_of_one_name_are_compared_apart() -> None:
    up = torch.randn(8, 6)
    rows = [Box((0, 0), (5, 6)), Box((5, 0), (3, 6))]
    columns = [Box((0, 0), (8, 2)), Box((0, 4), (8, 2))]
    source = TensorSource([part("up", up, box) for box in rows])
    pieces = [part("up", torch.zeros(8, 6).bfloat16(), box) for box in columns]
    ends = ends_of(source, sink_of(pieces))
    assert counts(compared(ends)) == (2, 0, 0, 0)
    for box, (_, piece) in zip(columns, pieces, strict=True):
        assert torch.equal(piece.local, up[:, box.offset[1] :][:, :2].bfloat16())
    pieces[1][1].local[7, 1] += 1
    found = compared(ends, push=False)
    assert [(one.name, one.box) for one in found.mismatches] == [("up", columns[1])]


@pytest.mark.parametrize("num_bytes", [2, 12, 40, 108, 4096])
@pytest.mark.parametrize("source", [TensorSource, ReadSource])
def test_a_sink_of_small_portions_gets_everything(
    num_bytes: int, source: type[TensorSource]
) -> None:
    sink = PortionSink(engine(), num_bytes)
    assert counts(compared(ends_of(source(whole(trainer())), sink))) == (4, 0, 0, 0)
    assert all(torch.equal(sink.engine[name], w.bfloat16()) for name, w in trainer().items())
    sizes = {name: one.numel() * 2 for name, one in trainer().items()}
    assert sink.events.count("cut") == sum(size > num_bytes for size in sizes.values())


@pytest.mark.parametrize("sink", ["tensors", "portions"])
def test_a_perturbed_push_is_found_and_a_second_one_restores(sink: str) -> None:
    held = engine()
    target = sink_of(whole(held)) if sink == "tensors" else PortionSink(held, 40)
    ends = ends_of(TensorSource(whole(trainer())), target)
    plan = plan_of(ends)
    perturbed = replace(ends, source=PerturbedSource(ends.the_source()))
    moves = [move for move in plan.moves if move.name == "scale"]
    execute(plan.moves, ends, None)
    execute(moves, perturbed, None)
    found = Verifier(moves, (), ends).compare(None)
    assert [one.name for one in found.mismatches] == ["scale"]
    execute(moves, ends, None)
    assert counts(compared(ends, push=False)) == (4, 0, 0, 0)


def test_replicas_are_planned_from_their_first_holder() -> None:
    source = TensorSource(whole(trainer()))
    half = TensorSource([part("norm.weight", torch.zeros(6), Box((0,), (3,)))])
    layouts = [source.layout(2), source.layout(4), source.layout(5)]
    moves = {
        rank: plan_moves(layouts, [source.layout(0)], None, rank).replicas for rank in (0, 2, 4, 5)
    }
    assert [(one.src, one.dst) for one in moves[2] if one.name == "scale"] == [(2, 4), (2, 5)]
    for rank in (4, 5):
        assert {(one.src, one.dst) for one in moves[rank]} == {(2, rank)}
        assert len(moves[rank]) == 4
    assert moves[0] == ()
    alone = plan_moves([half.layout(0)], [half.layout(1)], None, 0)
    assert alone.replicas == ()


def test_replicas_of_several_sources_are_compared_apart() -> None:
    """Their digests would add up otherwise, and neither source could be named."""
    ends = ends_over(trainer(), engine())
    move = next(one for one in plan_of(ends).moves if one.name == "scale")
    replicas = [replace(move, src=src, dst=0) for src in (1, 2)]
    found = Verifier((), replicas, ends)
    assert [target.sources for target in found._targets] == [[1], [2]]
    assert dict(found._incoming) == {1: [0], 2: [1]}
