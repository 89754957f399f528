"""Memory that comes and goes, by a driver that only keeps books: what a failed mapping leaves
behind.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmd_rl.errors import ResidencyError
from spmd_rl.offload import elastic

MADE = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")


class Driver:
    """Handles that exist, and whether one is mapped; refuses one call if told to."""

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
    made = Driver()
    monkeypatch.setattr(elastic, "_call", made)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 1 << 30))
    return made


@pytest.fixture
def memory(driver: Driver) -> elastic.ElasticMemory:
    """As its constructor leaves it, unmapped: that needs a GPU to reserve addresses on."""
    made = object.__new__(elastic.ElasticMemory)
    made._location, made._prop = elastic._Location(elastic.DEVICE, 0), elastic._AllocationProp()
    made._size, made._address, made._handles = 1 << 21, 1 << 40, []
    return made


@pytest.mark.parametrize("refused", MADE)
def test_a_mapping_that_fails_leaves_nothing(
    memory: elastic.ElasticMemory, driver: Driver, refused: str
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


def test_more_than_is_left_is_not_asked_for(memory: elastic.ElasticMemory, driver: Driver) -> None:
    memory._size = 2 << 30
    with pytest.raises(
        ResidencyError, match=r"2.000 GiB are asked for, and the GPU has 1.000 GiB left"
    ):
        memory.map()
    assert driver.handles == 0
