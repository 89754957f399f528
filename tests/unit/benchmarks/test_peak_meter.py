"""The peak of memory in use, where regions sleep and wake between two readings."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peak_meter import PeakMeter
from spmd_rl.offload.region import TorchRegion


def test_memory_that_sleeps_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator has the region's 1,000 bytes all the time, and more at each peak."""
    for name in ("unmap", "map"):  # so that they are as before at the end
        monkeypatch.setattr(TorchRegion, name, getattr(TorchRegion, name))
    allocator = {"peak": 0, "reserved": 6000}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocator["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: allocator.update(peak=1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: allocator["reserved"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (90_000, 100_000))
    meter = PeakMeter()
    region = TorchRegion("master", "save", torch.device("cpu"), "test.master")
    tensor = torch.zeros(1000, dtype=torch.uint8)
    region.hold(lambda: [tensor])

    allocator["peak"] = 3000
    region.unmap()
    allocator["peak"] = 3900  # 2,900 in use besides
    region.map()
    allocator["peak"] = 2000
    assert meter.read() == (10_000 - 6000, 3000)
    allocator["peak"] = 1500
    region.unmap()
    assert meter.read() == (10_000 - 5000, 1500)
    region.map()
