"""The other process of the tests of slabs and portions.

    python -m tests.unit.weights.peer_process DEVICE FD [FD ...]

Each descriptor is one end of a socketpair, served by a thread of its own. The parent sends an
`Order`, and gets a `Report` for each.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.errors import LostRankError, SpmdError
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box
from spmd_rl.weights.slab.peer_socket import PeerMessage, PeerSocket
from spmd_rl.weights.slab.portion_reader import PortionReader
from spmd_rl.weights.slab.portion_writer import PortionWriter
from spmd_rl.weights.slab.portions import cut_box
from spmd_rl.weights.slab.slab import MappedSlab, Slab

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120.0  # generous: an end of file comes at once


class Order(PeerMessage, frozen=True):
    """What the peer process is to do."""

    name: str


class Report(PeerMessage, frozen=True):
    """What came of an order. `num_fds` and `rss_kib` are those of the process."""

    digest: str
    num_fds: int
    rss_kib: int


EXTRA = (Order, Report)


class Peer(NamedTuple):
    """A running peer process, and this end of each of its sockets."""

    process: subprocess.Popen[bytes]
    sockets: list[PeerSocket]


@contextmanager
def peer_process(num_sockets: int = 1, device: str = "cpu") -> Iterator[Peer]:
    pairs = [socket.socketpair() for _ in range(num_sockets)]
    fds = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-m", __name__, device, *map(str, fds)]
    process = subprocess.Popen(command, pass_fds=fds, cwd=ROOT)
    sockets = [
        PeerSocket(ours, f"engine of rank 3 (pid {process.pid})", EXTRA) for ours, _ in pairs
    ]
    for _, theirs in pairs:
        theirs.close()
    try:
        yield Peer(process, sockets)
    finally:
        for sock in sockets:
            sock.close()
        process.kill()
        process.wait()


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def push(writer: PortionWriter, tensors: dict[str, Tensor]) -> None:
    """Send whole tensors, in boxes that fit."""
    for name, tensor in tensors.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        whole = Box((0,) * len(shape), shape)
        for box in cut_box(whole, ITEM_BYTES[dtype], writer.max_bytes):
            slot = writer.slot(name, box, shape, dtype)
            if slot is None:
                writer.flush()
                slot = writer.slot(name, box, shape, dtype)
            assert slot is not None
            slot.copy_(tensor[box.within(whole)])
    writer.finish()


def read_push(reader: PortionReader) -> dict[str, Tensor]:
    """Receive whole tensors. Bytes that no box wrote stay -1 or 255."""
    tensors: dict[str, Tensor] = {}
    for portion in reader:
        for entry, piece in zip(portion.entries, portion.tensors, strict=True):
            if entry.name not in tensors:
                tensors[entry.name] = piece.new_empty(entry.shape)
                tensors[entry.name].view(-1).view(torch.uint8).fill_(255)
            whole = Box((0,) * len(entry.shape), entry.shape)
            tensors[entry.name][entry.box.within(whole)] = piece
        reader.ack(portion)
    return tensors


def order(peer: PeerSocket, name: str) -> None:
    peer.send(Order(name))


def report(peer: PeerSocket) -> Report:
    message = peer.receive(DEADLINE_S)
    assert isinstance(message, Report)
    return message


def own_report(text: str = "") -> Report:
    status = Path("/proc/self/status").read_text()
    (rss,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return Report(text, len(os.listdir("/proc/self/fd")), int(rss))


class Server:
    """Orders of one socket."""

    def __init__(self, peer: PeerSocket, device: torch.device) -> None:
        self.peer = peer
        self.device = device
        self.mapped: MappedSlab | None = None
        self.reader: PortionReader | None = None
        self.orders: dict[str, Callable[[], str]] = {
            "slab": self.map_slab,
            "push": self.read,
            "die": self.die,
            "stall": self.stall,
            "owner dies": self.own_and_die,
        }

    def serve(self) -> None:
        while True:
            try:
                message = self.peer.receive(DEADLINE_S)
                assert isinstance(message, Order)
                text = self.orders[message.name]()
            except LostRankError:
                return
            except SpmdError as error:
                text = f"{type(error).__name__}: {error}"
            self.peer.send(own_report(text))

    def map_slab(self) -> str:
        if self.mapped is not None:
            self.mapped.close()
            self.reader = None
        self.mapped = MappedSlab.receive(self.peer, self.device, DEADLINE_S)
        self.reader = PortionReader(self.mapped, self.peer, DEADLINE_S)
        return ""

    def read(self) -> str:
        assert self.reader is not None
        return digest(read_push(self.reader))

    def die(self) -> str:
        self.stall()
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def stall(self) -> str:
        """Receive one portion, and keep it."""
        assert self.reader is not None
        next(iter(self.reader))
        return ""

    def own_and_die(self) -> str:
        """Be the rank: send a slab and one portion, and die."""
        slab = Slab.create(1 << 12, self.device)
        slab.send(self.peer)
        writer = PortionWriter(slab, self.peer, DEADLINE_S)
        slot = writer.slot("w", Box((0,), (8,)), (8,), "float32")
        assert slot is not None
        slot.fill_(3.0)
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


def main() -> None:
    device = torch.device(sys.argv[1])
    sockets = [socket.socket(fileno=int(fd)) for fd in sys.argv[2:]]
    servers = [Server(PeerSocket(sock, "rank 3", EXTRA), device) for sock in sockets]
    threads = [threading.Thread(target=server.serve) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
