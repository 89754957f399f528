"""Parameters of FSDP2 and their optimizer's state in regions of torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from spmd_rl.offload.regions import Regions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, DEPTH = 512, 4


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    pytest.importorskip("torch_memory_saver")
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)) for _ in range(DEPTH))
    )


def local(model: nn.Module) -> list[Tensor]:
    sharded = [one for one in model.parameters() if isinstance(one, DTensor)]
    assert len(sharded) == len(list(model.parameters()))
    return [one.to_local() for one in sharded]


class Trainer:
    """A small trainer whose masters and moments sleep, if it has regions."""

    def __init__(self, mesh: DeviceMesh, regions: Regions | None) -> None:
        self.regions = regions
        with torch.device("meta"):
            self.model = layers()
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        assert isinstance(self.model, FSDPModule)
        if regions is None:
            self.model.to_empty(device="cuda")
        else:
            master = regions.torch_region("master", "save")
            with master.allocating():
                self.model.to_empty(device="cuda")
            master.hold(lambda: local(self.model))
        made = torch.Generator("cuda").manual_seed(3)
        with torch.no_grad():
            for tensor in local(self.model):
                tensor.normal_(std=0.05, generator=made)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        if regions is not None:
            moments = regions.torch_region("moments", "save")
            with moments.allocating():
                self._first_step()
            moments.hold(self._moments)
        else:
            self._first_step()

    def _first_step(self) -> None:
        """Make the optimizer's state, with gradients of zero."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _moments(self) -> list[Tensor]:
        return [
            state[name].to_local()
            for state in self.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]

    def step(self) -> Tensor:
        made = torch.Generator("cuda").manual_seed(11)
        x = torch.randn(64, WIDTH, device="cuda", generator=made)
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def cycle(self) -> None:
        if self.regions is not None:
            for tag in ("master", "moments"):
                self.regions.note_change(tag)
            receipt = self.regions.sleep()
            assert receipt.copied_bytes >= 3 * 4 * DEPTH * WIDTH * WIDTH
            self.regions.wake(in_background=["moments"])
            self.regions.wait_loaded("moments")


def test_training_has_the_same_bits(mesh: DeviceMesh) -> None:
    plain = Trainer(mesh, None)
    sleeper = Trainer(mesh, Regions("train", torch.device("cuda", 0)))
    places = [tensor.data_ptr() for tensor in local(sleeper.model)]
    for _ in range(3):
        assert torch.equal(plain.step(), sleeper.step())
        sleeper.cycle()
    assert [tensor.data_ptr() for tensor in local(sleeper.model)] == places
    for one, other in zip(local(plain.model), local(sleeper.model), strict=True):
        assert torch.equal(one, other)


def test_a_sleep_without_a_note_restores_old_weights(mesh: DeviceMesh) -> None:
    """Negative control: bytes that are said to be unchanged are not copied again."""
    sleeper = Trainer(mesh, Regions("stale", torch.device("cuda", 0)))
    sleeper.cycle()
    before = sleeper.step()
    assert sleeper.regions is not None
    sleeper.regions.sleep()
    sleeper.regions.wake()
    assert torch.equal(sleeper.step(), before)
