"""TCP sockets that processes of this host listen on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LISTENING = "0A"


class Listener(NamedTuple):
    """A port, and the address that it listens on, in the digits of /proc/net/tcp."""

    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether other hosts cannot reach it."""
        return self.address in ("0100007F", "00000000000000000000000001000000")


def process_tree(root: int) -> set[int]:
    """Return the pids of a process and its living descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, new = {root}, [root]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found |= set(new)
    return found


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Return what these processes listen on."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # it has been closed
                sockets.add(os.readlink(link))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in map(str.split, Path(table).read_text().splitlines()[1:]):
            if row[3] == LISTENING and f"socket:[{row[9]}]" in sockets:
                address, _, port = row[1].rpartition(":")
                found.add(Listener(address, int(port, 16)))
    return found


def open_ports(root: int) -> set[int]:
    """Return the TCP ports that a process and its descendants listen on."""
    return {one.port for one in listeners(process_tree(root))}
