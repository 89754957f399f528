"""Regions of one role on a GPU, with memory of torch and a slab."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmd_rl.offload.region import Contents
from spmd_rl.offload.regions import Regions

MIB = 1 << 20
SMALL, LARGE = (37, 53), (1 << 20,)  # shapes of float32: 7.7 KiB and 4 MiB


class Role:
    """`num_small` small and `num_large` large tensors in region "master", and a slab "kv"."""

    def __init__(
        self,
        num_small: int = 200,
        num_large: int = 20,
        contents: Contents = "save",
        slab: Contents = "drop",
        slab_bytes: int = 64 * MIB,
        as_one: bool = False,
    ) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.regions = Regions("role", self.device)
        self.master = self.regions.torch_region("master", contents)
        shapes = [SMALL] * num_small + [LARGE] * num_large
        whole = sum(4 * torch.Size(shape).numel() + 512 for shape in shapes)
        made = torch.Generator("cuda").manual_seed(7)
        with self.master.allocating(whole if as_one else 0):
            self.tensors = [torch.empty(shape, device=self.device) for shape in shapes]
        for tensor in self.tensors:
            tensor.normal_(generator=made)
        self.master.hold(lambda: self.tensors)
        self.kv = self.regions.slab("kv", slab, slab_bytes).bytes
        self.kv.random_(generator=made)

    def digests(self) -> list[int]:
        """Return a sum of bits of each tensor, and of the slab."""
        words = [tensor.view(torch.int32) for tensor in self.tensors]
        sums = [word.long().sum() for word in (*words, self.kv.view(torch.int32))]
        return torch.stack(sums).tolist()

    def cycle(self) -> None:
        self.regions.sleep()
        self.regions.wake()


@pytest.fixture
def make_role() -> Callable[..., Role]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("torch_memory_saver")
    return Role


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def cached_bytes() -> int:
    """Return what torch has cached; pools of regions whose role is gone stay so."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
