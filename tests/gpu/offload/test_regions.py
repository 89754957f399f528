"""Regions on a GPU: addresses, contents, memory that comes back, graphs, FSDP2, failures."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.regions import Regions

pytest.importorskip("torch_memory_saver")
DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def tensors_in(regions: Regions, tag: str) -> list[Tensor]:
    region = regions.torch_region(tag, "save")
    with region.allocating():
        made = [torch.empty(size, device=DEVICE) for size in (40 * MIB, 3, 7 * MIB, 1000)]
    for tensor in made:
        tensor.normal_()
    region.hold(lambda: made)
    return made


def test_contents_addresses_and_memory() -> None:
    regions = Regions("contents", DEVICE)
    made = tensors_in(regions, "master")
    slab = regions.slab("kv", "drop", 300 * MIB)
    expected, addresses = [one.clone() for one in made], [one.data_ptr() for one in made]
    at = slab.bytes.data_ptr()
    for _ in range(20):
        receipt = regions.sleep()
        before, after = receipt.free_bytes
        assert after - before >= 0.99 * sum(receipt.before.values())
        regions.wake()
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
        assert [one.data_ptr() for one in made] == addresses
        assert slab.bytes.data_ptr() == at


def test_a_graph_is_replayed_after_a_cycle() -> None:
    regions = Regions("graph", DEVICE)
    made = tensors_in(regions, "weights")
    x, out = torch.randn(1000, device=DEVICE), torch.empty(1000, device=DEVICE)
    torch.add(made[3], x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(made[3], x, out=out)
    graph.replay()
    expected = out.clone()
    regions.sleep()
    regions.wake()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_contents_come_in_the_background() -> None:
    regions = Regions("background", DEVICE)
    made = tensors_in(regions, "moments")
    expected = [one.clone() for one in made]
    regions.begin_save(["moments"])
    regions.sleep()
    regions.wake(in_background=["moments"])
    assert not regions.is_awake("moments")
    regions.wait_loaded("moments")
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_too_little_memory_leaves_everything_asleep() -> None:
    regions = Regions("refused", DEVICE)
    made = tensors_in(regions, "master")
    expected = [one.clone() for one in made]
    regions.sleep()
    free = torch.cuda.mem_get_info(DEVICE)[0]
    taken = torch.empty(free - 60 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ResidencyError, match="refused needs .* to wake, and the GPU has"):
        regions.wake()
    assert not regions.is_awake("master")
    del taken
    regions.wake()
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_a_sharded_model_computes_the_same_after_a_cycle() -> None:
    store = HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
    try:
        mesh = init_device_mesh("cuda", (1,))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        regions = Regions("sharded", DEVICE)
        region = regions.torch_region("master", "save")
        with region.allocating():
            model.to_empty(device=DEVICE)
        shards = [cast(DTensor, one).to_local().detach() for one in model.parameters()]
        for shard in shards:
            shard.normal_()
        region.hold(lambda: shards)
        x = torch.randn(64, 512, device=DEVICE)
        expected = model(x)
        regions.sleep()
        regions.wake()
        assert torch.equal(model(x), expected)
        model(x).sum().backward()
    finally:
        dist.destroy_process_group()
