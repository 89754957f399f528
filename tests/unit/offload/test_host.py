"""Host memory that is left to the system while it sleeps."""

from __future__ import annotations

import mmap
from pathlib import Path

from spmd_rl.offload.host import HostMemory

NUM_BYTES = 8 << 20


def lazily_freed_kib() -> int:
    """How much of this process's memory the system may take without asking."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("LazyFree"))


def test_it_begins_at_zero_and_keeps_its_address() -> None:
    memory = HostMemory(NUM_BYTES)
    address = memory.bytes.data_ptr()
    assert not memory.bytes.any()
    memory.bytes.fill_(7)
    memory.unmap()
    memory.unmap()
    assert not memory.is_mapped
    memory.map()
    assert memory.is_mapped
    assert memory.bytes.data_ptr() == address


def test_each_page_is_as_it_was_or_zero() -> None:
    memory = HostMemory(NUM_BYTES)
    memory.bytes.fill_(7)
    memory.unmap()
    memory.map()
    pages = memory.bytes.view(-1, mmap.PAGESIZE)
    assert ((pages == 7).all(dim=1) | (pages == 0).all(dim=1)).all()
    memory.bytes.fill_(9)
    assert (memory.bytes == 9).all()


def test_asleep_it_is_the_systems_to_take() -> None:
    memory = HostMemory(NUM_BYTES)
    memory.bytes.fill_(7)
    before = lazily_freed_kib()
    memory.unmap()
    # but for what is no whole huge page
    assert lazily_freed_kib() - before >= NUM_BYTES // 1024 - 4096
