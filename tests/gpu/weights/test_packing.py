"""Buckets that are packed and unpacked on a GPU: a push of other weights repeats the launches."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.kernels.runtime.cuda_kernels import has_cupy
from spmd_rl.weights.delivery import Delivery
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.packing import PackedBucket
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.tensor_ends import TensorSource
from tests.gpu.rollout.graph_case import DEVICE
from tests.unit.weights.ends_case import sink_of, whole

pytestmark = pytest.mark.skipif(not has_cupy(), reason="pip install -e '.[gpu]'")

SHAPES = [(7, 5), (4096,), (3, 1111), (100_000,), (), (3_000_001,), (0, 4)]


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_each_push_brings_the_weights_of_its_time(
    masters: torch.dtype, weights: torch.dtype
) -> None:
    """Later pushes, of weights that changed in place, take two launches."""
    generator = torch.Generator("cuda").manual_seed(0)
    held = {str(shape): torch.empty(shape, dtype=masters, device=DEVICE) for shape in SHAPES}
    engine = {name: torch.zeros_like(one, dtype=weights) for name, one in held.items()}
    source, sink = TensorSource(whole(held)), sink_of(whole(engine))
    bucket = PackedBucket(plan_moves([source.layout(0)], [sink.layout(1)], None, 0).moves)
    ends = LocalEnds(0, source, sink, DEVICE)
    launches = []
    for _ in range(3):
        for one in held.values():
            one.normal_(generator=generator)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            delivery = Delivery(sink)
            delivery.put_bucket(bucket, bucket.pack(ends))
            delivery.flush()
            torch.cuda.synchronize()
        launches.append(sum("copy<" in event.name for event in profile.events()))
        for name, one in engine.items():
            assert torch.equal(one, held[name].to(weights)), name
    if (masters, weights) != (torch.bfloat16, torch.float32):  # no kernel of ours has it
        assert launches[1:] == [2, 2]
