"""Buckets of a push between ranks, packed and unpacked within one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.weights.delivery import Delivery
from spmd_rl.weights.ends import WeightSink
from spmd_rl.weights.packing import PackedBucket
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.tensor_ends import TensorSource
from tests.unit.weights.ends_case import (
    CountingSource,
    PortionSink,
    ReadSource,
    ends_of,
    sink_of,
    whole,
)

SHAPES = {"embed.weight": (7, 5), "norm.weight": (5,), "scale": ()}


def masters(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def engine(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def bucket_of(source: TensorSource, sink: WeightSink) -> PackedBucket:
    """Return a bucket that goes from rank 0 to rank 1."""
    return PackedBucket(plan_moves([source.layout(0)], [sink.layout(1)], None, 0).moves)


def send(bucket: PackedBucket, source: TensorSource, sink: WeightSink) -> None:
    delivery = Delivery(sink)
    delivery.put_bucket(bucket, bucket.pack(ends_of(source, sink)))
    delivery.flush()


@pytest.mark.parametrize("kind", [CountingSource, ReadSource])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_push_brings_what_the_source_has_then(
    kind: type[TensorSource], dtype: torch.dtype
) -> None:
    held, parameters = masters(0), engine(dtype)
    source, sink = kind(whole(held)), sink_of(whole(parameters))
    bucket = bucket_of(source, sink)
    for seed in range(3):
        for name, changed in masters(seed).items():
            held[name].copy_(changed)
        send(bucket, source, sink)
        assert all(torch.equal(one, held[name].to(dtype)) for name, one in parameters.items())
    if isinstance(source, CountingSource):
        assert source.num_views == len(SHAPES)


@pytest.mark.parametrize("num_bytes", [12, 40, 4096])
@pytest.mark.parametrize("keeps_slots", [True, False])
def test_a_sink_of_portions_gets_the_same_bytes(num_bytes: int, keeps_slots: bool) -> None:
    """Where boxes are cut, or do not fit one flush, nothing is repeated."""
    held = masters(0)
    sink = PortionSink(engine(), num_bytes, keeps_slots)
    source = TensorSource(whole(held))
    bucket = bucket_of(source, sink)
    for seed in range(3):
        for name, changed in masters(seed).items():
            held[name].copy_(changed)
        send(bucket, source, sink)
        assert all(torch.equal(one, held[name].bfloat16()) for name, one in sink.engine.items())
    assert sink.events.count("repeat") == (2 if keeps_slots and num_bytes == 4096 else 0)


def test_slots_that_are_lost_are_asked_for_again() -> None:
    held, sink = masters(0), PortionSink(engine(), 4096, keeps_slots=True)
    source = TensorSource(whole(held))
    bucket = bucket_of(source, sink)
    send(bucket, source, sink)
    sink.lost = {0}
    held["scale"].fill_(3.0)
    send(bucket, source, sink)
    assert sink.engine["scale"] == 3.0
    assert len(sink.flushed) == 2
    send(bucket, source, sink)
    assert sink.last == [0, 1, 1]
