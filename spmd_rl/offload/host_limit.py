"""How much host memory this process may still take: of its cgroup, and of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
# below the root of cgroups in version 2 and in version 1: folder, limit, usage, and the name of
# what is cached of files and given back without a swap
CGROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
KEPT_BYTES = 2 << 30  # left for everything else of the machine


def host_bytes_left(
    cgroups: Path = CGROUPS, own: Path = OWN_CGROUP, meminfo: Path = MEMINFO
) -> int:
    """Return the bytes that one rank may take: an equal share for each rank of the machine.

    A machine may be larger than the cgroup of a job, so that the lesser of both counts. Where
    neither is known it is 0.
    """
    limits = list(_cgroups_left(cgroups, own))
    if (available := _available(meminfo)) is not None:
        limits.append(available)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(min(limits, default=0) - KEPT_BYTES, 0) // ranks_here


def _cgroups_left(root: Path, own: Path) -> Iterator[int]:
    """Yield what each cgroup that this process is in may still take, where it has a limit."""
    for name, limit, usage, cached in CGROUP_FILES:
        for path in _paths(own, name):
            folder = root / name / path.lstrip("/")
            for part in (folder, *folder.parents):
                left = _cgroup_left(part, limit, usage, cached)
                if left is not None:
                    yield left
                if part == root / name:
                    break


def _paths(own: Path, controller: str) -> list[str]:
    """Return the path of this process's cgroup. In a container it may be the root, or unknown."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and ".." not in path:
            return [path]
    return ["/"]


def _cgroup_left(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    """Return what a cgroup may still take; None where it has no limit, or cannot be read."""
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdigit() or not used.isdigit():
        return None
    given_back = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cached:
            given_back = int(value)
    return int(most) - int(used) + given_back


def _available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _read(path: Path) -> str:
    """Return the text of a file of the system; "" where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
