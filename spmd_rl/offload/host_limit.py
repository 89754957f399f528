"""How much host memory this process may still take: of its cgroup, and of the machine."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# the limit and the usage of a cgroup, in version 2 and in version 1
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
MEMINFO = Path("/proc/meminfo")
KEPT_BYTES = 2 << 30  # left for everything else of the machine


def host_bytes_left(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int:
    """Return the bytes that one rank may take: an equal share for each rank of the machine.

    A machine may be larger than the cgroup of a job, so that the lesser of both counts. Where
    neither is known it is 0.
    """
    limits = [left for files in CGROUP_FILES if (left := _cgroup_left(cgroup, *files)) is not None]
    if (available := _available(meminfo)) is not None:
        limits.append(available)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(min(limits, default=0) - KEPT_BYTES, 0) // ranks_here


def _cgroup_left(folder: Path, limit: str, usage: str) -> int | None:
    """Return what a cgroup may still take; None where it has no limit, or cannot be read."""
    try:
        words = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    return int(words) - used if words.isdigit() else None


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None
