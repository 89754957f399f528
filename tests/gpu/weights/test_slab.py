"""Slab on a GPU: VMM memory that a second process reads bit for bit, and never too early."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from spmd_rl.errors import LostRankError, WeightsError
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.slab import portion_writer
from spmd_rl.weights.slab.peer_socket import PeerSocket, SlabHeader
from spmd_rl.weights.slab.portion_writer import PortionWriter
from spmd_rl.weights.slab.slab import MappedSlab, Slab
from tests.unit.weights.peer_process import Peer, digest, order, peer_process, push, report

DEADLINE_S = 120.0
SLAB_BYTES = 64 << 20
HALF_A_SECOND = 900_000_000  # cycles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def device() -> torch.device:
    torch.zeros(1, device="cuda")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def engine(device: torch.device) -> Iterator[Peer]:
    with peer_process(device=str(device)) as peer:
        send_slab(peer.sockets[0], device).close()  # its context exists from here on
        yield peer


def send_slab(peer: PeerSocket, device: torch.device, num_bytes: int = SLAB_BYTES) -> Slab:
    slab = Slab.create(num_bytes, device)
    order(peer, "slab")
    slab.send(peer)
    assert report(peer).digest == ""
    return slab


def weights(seed: int) -> dict[str, Tensor]:
    """Tensors of 300 MiB, some larger than half a slab."""
    made = torch.Generator("cuda").manual_seed(seed)
    shapes = {"embed": (60000, 1024), "norm": (1024,), "up": (3072, 1024), "odd": (7, 13)}
    tensors = {n: torch.randn(s, generator=made, device="cuda") for n, s in shapes.items()}
    return tensors | {f"{n}.bf16": tensor.bfloat16() for n, tensor in tensors.items()}


def test_a_push_reaches_the_other_process_bit_for_bit(engine: Peer, device: torch.device) -> None:
    (peer,) = engine.sockets
    slab = send_slab(peer, device)
    writer = PortionWriter(slab, peer, DEADLINE_S)
    for seed in (1, 2):
        order(peer, "push")
        push(writer, weights(seed))
        assert report(peer).digest == digest(weights(seed))
    slab.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_table_is_sent_when_the_stream_is_done(
    engine: Peer, device: torch.device, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Without the wait, the other process reads what was there before."""
    (peer,) = engine.sockets
    slab = send_slab(peer, device)
    slab.memory.zero_()
    torch.cuda.synchronize()
    if not waits:
        monkeypatch.setattr(portion_writer, "wait_for_stream", lambda device: None)
    value = torch.full((1 << 20,), 3.0, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        order(peer, "push")
        torch.cuda._sleep(HALF_A_SECOND)
        push(PortionWriter(slab, peer, DEADLINE_S), {"w": value})
    received = report(peer).digest
    torch.cuda.synchronize()
    assert (received == digest({"w": value})) == waits
    slab.close()


@pytest.mark.alone
def test_slabs_that_are_replaced_leave_no_memory(engine: Peer, device: torch.device) -> None:
    (peer,) = engine.sockets
    free = []
    for _ in range(30):
        slab = send_slab(peer, device, 256 << 20)
        slab.close()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[1] - (8 << 20)


def test_a_wrong_descriptor_is_refused(device: torch.device) -> None:
    ours, theirs = socket.socketpair()
    rank, other = PeerSocket(ours, "engine of rank 3"), PeerSocket(theirs, "rank 3")
    slab = Slab.create(2 << 20, device)
    slab.send(rank)
    header = other.receive(DEADLINE_S)
    good_fd = other.receive_fd(DEADLINE_S)
    assert isinstance(header, SlabHeader)
    memfd = os.memfd_create("test")
    os.ftruncate(memfd, slab.num_bytes)
    for num_bytes, gpu, fd in [
        (slab.num_bytes * 64, header.gpu, good_fd),  # more than was made
        (slab.num_bytes, header.gpu, memfd),
        (slab.num_bytes, header.gpu, rank.fileno()),
        (slab.num_bytes, "another", good_fd),
    ]:
        rank.send(SlabHeader(num_bytes, 1, "cuda", gpu))
        rank.send_fd(fd)
        with pytest.raises(WeightsError):
            MappedSlab.receive(other, device)
    os.close(memfd)
    os.close(good_fd)
    slab.memory.fill_(7)  # the GPU has not failed
    assert int(slab.memory.sum(dtype=torch.int64)) == 7 * slab.num_bytes
    slab.close()
    rank.close()
    other.close()


def test_a_process_that_is_killed_in_a_push_leaves_the_slab_usable(device: torch.device) -> None:
    with peer_process(device=str(device)) as (process, (peer,)):
        slab = send_slab(peer, device)
        writer = PortionWriter(slab, peer, DEADLINE_S)
        order(peer, "die")
        with pytest.raises(LostRankError, match=f"pid {process.pid}"):
            push(writer, weights(1))
        assert process.wait() == -signal.SIGKILL
    view = slab.view(slab.generation, 0, "float32", (8,))
    view.fill_(2.0)
    assert view.sum().item() == 16.0
    slab.close()


def test_a_slot_takes_a_cast(engine: Peer, device: torch.device) -> None:
    (peer,) = engine.sockets
    slab = send_slab(peer, device)
    writer = PortionWriter(slab, peer, DEADLINE_S)
    master = torch.randn(512, 64, device=device)
    order(peer, "push")
    slot = writer.slot("w", Box((0, 0), (512, 64)), (512, 64), "bfloat16")
    assert slot is not None
    torch._foreach_copy_([slot], [master])
    writer.finish()
    assert report(peer).digest == digest({"w": master.bfloat16()})
    slab.close()
