"""Executors within one process; what crosses ranks is in tests/dist/test_weights.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor, _buckets, alias, execute
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.tensor_ends import TensorSource
from tests.unit.weights.ends_case import (
    CountingSource,
    PortionSink,
    ReadSource,
    ends_of,
    ends_over,
    plan_of,
    whole,
)


def _trainer(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (7, 5), "norm.weight": (5,), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def _engine(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.zeros_like(one, dtype=dtype), requires_grad=False)
        for name, one in _trainer().items()
    }


def _aliased(ends: LocalEnds) -> LocalEnds:
    return replace(ends, shared=alias(ends.the_source(), ends.the_sink(), 0))


def _pushed(ends: LocalEnds) -> tuple[int, int]:
    traffic = execute(plan_of(ends).moves, ends, None)
    assert traffic.sent_bytes == traffic.received_bytes == 0
    return traffic.aliased_bytes, traffic.copied_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_casts_to_the_destination(dtype: torch.dtype) -> None:
    source, engine = _trainer(), _engine(dtype)
    kept = {name: one.data_ptr() for name, one in engine.items()}
    assert _pushed(ends_over(source, engine)) == (0, 41 * dtype.itemsize)
    for name, one in engine.items():
        assert torch.equal(one, source[name].to(dtype))
        assert one.data_ptr() == kept[name]


def test_an_alias_sees_every_optimizer_step_and_moves_nothing() -> None:
    source, engine = _trainer(), _engine(torch.float32)
    ends = _aliased(ends_over(source, engine))
    assert {name for name, _ in ends.shared} == set(source)
    optimizer = torch.optim.AdamW(source.values(), lr=0.1, fused=True)
    for one in source.values():
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert _pushed(ends) == (41 * 4, 0)
    assert all(torch.equal(engine[name], source[name]) for name in source)
    assert not any(torch.equal(engine[name], one) for name, one in _trainer().items())


def test_another_dtype_or_box_is_not_aliased() -> None:
    assert not _aliased(ends_over(_trainer(), _engine(torch.bfloat16))).shared
    embed = _trainer()["embed.weight"]
    half = LocalTensor((7, 5), Box((0, 0), (4, 5)), embed[:4].clone())
    ends = ends_over({}, {"embed.weight": _engine(torch.float32)["embed.weight"]})
    assert not _aliased(replace(ends, source=TensorSource([("embed.weight", half)]))).shared


def test_a_held_tensor_must_be_its_box() -> None:
    with pytest.raises(ValueError, match="'a': a local tensor of"):
        LocalTensors({"a": LocalTensor((7, 5), Box((0, 0), (4, 5)), torch.zeros(7, 5))})


@pytest.mark.parametrize("limit", [16, 64, 100, 4096])
def test_buckets_keep_to_their_size_and_lose_nothing(limit: int) -> None:
    layout = LocalTensors.whole(
        {"a": torch.zeros(9, 5), "b": torch.zeros(3), "c": torch.zeros(2, 2)}
    ).layout
    moves = plan_moves([layout(0)], [layout(1)], None, 0).moves
    (buckets,) = _buckets(moves, "dst", limit).values()
    assert sum(move.num_bytes for bucket in buckets for move in bucket) == sum(
        move.num_bytes for move in moves
    )
    for bucket in buckets:
        # A row of "a" is 20 bytes and may not be cut.
        assert len(bucket) == 1 or sum(move.num_bytes for move in bucket) <= limit
        assert sum(move.num_bytes for move in bucket) <= max(limit, 20)


def _change(source: dict[str, nn.Parameter], seed: int) -> None:
    with torch.no_grad():
        for name, other in _trainer(seed).items():
            source[name].copy_(other)


@pytest.mark.parametrize("num_bytes", [12, 40, 4096])
@pytest.mark.parametrize("keeps_slots", [True, False])
def test_a_second_run_repeats_the_flushes_of_the_first(num_bytes: int, keeps_slots: bool) -> None:
    """A sink that does not keep slots is asked for each of them again."""
    trainer = _trainer()
    source = CountingSource(whole(trainer))
    sink = PortionSink(_engine(torch.bfloat16), num_bytes, keeps_slots)
    ends = ends_of(source, sink)
    executor = Executor(plan_of(ends).moves, ends)
    executor.run(None)
    num_views, events = source.num_views, list(sink.events)
    for seed in (1, 2):
        sink.events.clear()
        _change(trainer, seed)
        executor.run(None)
        for name, one in sink.engine.items():
            assert torch.equal(one, trainer[name].bfloat16())
        assert sink.events.count("flush") == events.count("flush")
        assert sink.events.count("repeat") == (events.count("flush") if keeps_slots else 0)
    assert source.num_views == (num_views if keeps_slots else 3 * num_views)


def test_a_flush_that_cannot_be_repeated_is_made_anew() -> None:
    """The others are repeated all the same, and so is the new one after that."""
    trainer = _trainer()
    sink = PortionSink(_engine(torch.bfloat16), 40, keeps_slots=True)
    ends = ends_of(TensorSource(whole(trainer)), sink)
    executor = Executor(plan_of(ends).moves, ends)
    executor.run(None)
    assert len(sink.flushed) > 2
    for seed, lost in enumerate(([1], [0, 1], [], [2]), start=1):
        _change(trainer, seed)
        sink.lost = {sink.last[number] for number in lost}
        sink.last = []
        num_flushes = len(sink.flushed)
        executor.run(None)
        assert len(sink.flushed) == num_flushes + len(lost)
        for name, one in sink.engine.items():
            assert torch.equal(one, trainer[name].bfloat16())


def test_what_a_source_has_to_make_is_not_prepared() -> None:
    trainer = _trainer()
    sink = PortionSink(_engine(torch.bfloat16), 40, keeps_slots=True)
    ends = ends_of(ReadSource(whole(trainer)), sink)
    executor = Executor(plan_of(ends).moves, ends)
    for seed in (1, 2):
        _change(trainer, seed)
        executor.run(None)
        assert "repeat" not in sink.events
        for name, one in sink.engine.items():
            assert torch.equal(one, trainer[name].bfloat16())
