"""ElasticMemory over a fake driver that only counts: a failed mapping leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmd_rl.errors import ResidencyError
from spmd_rl.offload import vmm
from spmd_rl.offload.elastic import ElasticMemory

MAP_CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")


class Driver:
    """A driver that counts handles and mappings, and fails the call named `refused`."""

    def __init__(self) -> None:
        self.refuses = ""
        self.handles = 0
        self.mapped = False

    def __call__(self, name: str, *arguments: Any) -> None:
        if name == self.refuses:
            raise ResidencyError(f"{name}: refused")
        self.handles += {"cuMemCreate": 1, "cuMemRelease": -1}.get(name, 0)
        self.mapped = {"cuMemMap": True, "cuMemUnmap": False}.get(name, self.mapped)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(vmm, "call", fake)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 1 << 30))
    return fake


@pytest.fixture
def memory(driver: Driver) -> ElasticMemory:
    """Unmapped memory, made without the constructor, which needs a GPU to reserve addresses."""
    addresses = object.__new__(vmm.AddressRange)
    addresses._location, addresses._prop = vmm.Location(vmm.DEVICE, 0), vmm.AllocationProp()
    addresses.size, addresses.address, addresses._handles = 1 << 21, 1 << 40, []
    memory = object.__new__(ElasticMemory)
    memory._range = addresses
    return memory


@pytest.mark.parametrize("refused", MAP_CALLS)
def test_a_mapping_that_fails_leaves_nothing(
    memory: ElasticMemory, driver: Driver, refused: str
) -> None:
    driver.refuses = refused
    with pytest.raises(ResidencyError, match=f"{refused}: refused"):
        memory.map()
    assert (driver.handles, driver.mapped, memory.is_mapped) == (0, False, False)
    driver.refuses = ""
    memory.map()
    assert (driver.handles, driver.mapped, memory.is_mapped) == (1, True, True)
    memory.unmap()
    assert (driver.handles, driver.mapped, memory.is_mapped) == (0, False, False)


def test_more_than_is_left_is_not_asked_for(memory: ElasticMemory, driver: Driver) -> None:
    memory._range.size = 2 << 30
    with pytest.raises(
        ResidencyError, match=r"2.000 GiB are asked for, and the GPU has 1.000 GiB left"
    ):
        memory.map()
    assert driver.handles == 0
