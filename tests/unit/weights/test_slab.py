"""Slab: memory of two processes, its checks of views, and descriptors that it refuses to map."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import tempfile
from collections.abc import Iterator

import pytest
import torch

from spmd_rl.errors import ResidencyError, StaleSlabError, WeightsError
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.slab.peer_socket import EndOfPush, PeerSocket, SlabHeader
from spmd_rl.weights.slab.portion_writer import PortionWriter
from spmd_rl.weights.slab.slab import MappedSlab, Slab
from tests.unit.weights.peer_process import order, peer_process, report

CPU = torch.device("cpu")
NUM_BYTES = 4096


@pytest.fixture
def ends() -> Iterator[tuple[PeerSocket, PeerSocket]]:
    ours, theirs = socket.socketpair()
    rank, engine = PeerSocket(ours, "engine of rank 3"), PeerSocket(theirs, "rank 3")
    yield rank, engine
    rank.close()
    engine.close()


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create(NUM_BYTES, CPU)
    yield slab
    slab.close()


def memfd(num_bytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_both_ends_are_the_same_memory(ends: tuple[PeerSocket, PeerSocket], slab: Slab) -> None:
    slab.send(ends[0])
    mapped = MappedSlab.receive(ends[1], CPU)
    assert (mapped.generation, mapped.num_bytes) == (slab.generation, NUM_BYTES)
    slab.memory.copy_(torch.arange(NUM_BYTES) % 251)
    assert torch.equal(mapped.memory, slab.memory)
    view = mapped.view(slab.generation, 256, "float32", (2, 3))
    view.fill_(2.5)
    assert (slab.memory[256:280].view(torch.float32) == 2.5).all()
    mapped.close()
    assert (view == 2.5).all()


def test_a_stale_generation_is_refused(ends: tuple[PeerSocket, PeerSocket], slab: Slab) -> None:
    slab.send(ends[0])
    mapped = MappedSlab.receive(ends[1], CPU)
    newer = Slab.create(NUM_BYTES, CPU)
    assert newer.generation > slab.generation
    mapped.view(slab.generation, 0, "uint8", (1,))
    for generation in (newer.generation, 0, -1):
        with pytest.raises(StaleSlabError, match=f"slab {generation} is asked for"):
            mapped.view(generation, 0, "uint8", (1,))
    mapped.close()
    with pytest.raises(StaleSlabError):
        mapped.view(slab.generation, 0, "uint8", (1,))
    newer.close()


@pytest.mark.parametrize(
    ("offset", "dtype", "shape", "problem"),
    [
        (NUM_BYTES, "uint8", (1,), "bytes 4096 to 4097 are asked for, and the slab has 4096"),
        (0, "uint8", (NUM_BYTES + 1,), "bytes 0 to 4097"),
        (0, "bfloat16", (1 << 40, 1 << 40), "bytes 0 to"),
        (NUM_BYTES - 256, "float32", (65,), "bytes 3840 to 4100"),
        (-256, "uint8", (1,), "bytes -256 to -255"),
        (128, "uint8", (1,), "offset 128 of a slab is not a multiple of 256"),
        (1, "float32", (1,), "offset 1 of a slab"),
        (0, "uint8", (-1,), "cannot have the shape"),
        (0, "uint8", (-1, -1), "cannot have the shape"),
        (0, "uint8", (1,) * 9, "cannot have the shape"),
        (0, "object", (1,), "no dtype 'object'"),
    ],
)
def test_a_view_outside_the_slab_is_refused(
    slab: Slab, offset: int, dtype: str, shape: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(WeightsError, match=problem):
        slab.view(slab.generation, offset, dtype, shape)


def test_the_last_bytes_and_none_can_be_viewed(slab: Slab) -> None:
    assert slab.view(slab.generation, NUM_BYTES - 256, "float64", (4, 8)).shape == (4, 8)
    assert slab.view(slab.generation, NUM_BYTES, "float64", (0, 8)).numel() == 0
    assert slab.view(slab.generation, 0, "float64", ()).shape == ()


@pytest.mark.parametrize(
    ("fd", "problem"),
    [
        (lambda: memfd(NUM_BYTES - 1), "4096 bytes are announced, the memfd has 4095"),
        (lambda: memfd(NUM_BYTES, 0), "not a memfd that is sealed against"),
        (lambda: memfd(NUM_BYTES, fcntl.F_SEAL_GROW), "sealed against"),
        (
            lambda: memfd(NUM_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
            "cannot map 4096 bytes",
        ),
        (lambda: os.pipe()[0], "sealed against"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "sealed against"),
        (lambda: os.open(tempfile.gettempdir(), os.O_RDWR | os.O_TMPFILE), "sealed against"),
    ],
)
def test_a_descriptor_that_is_no_slab_is_refused(
    ends: tuple[PeerSocket, PeerSocket], fd: object, problem: str
) -> None:
    made = fd()  # type: ignore[operator]
    ends[0].send(SlabHeader(num_bytes=NUM_BYTES, generation=1, kind="cpu", gpu=""))
    ends[0].send_fd(made)
    os.close(made)
    gc.collect()  # or sockets of earlier tests may be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightsError, match=f"the slab of rank 3 cannot be mapped.*{problem}"):
        MappedSlab.receive(ends[1], CPU)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("kind", "gpu", "problem"),
    [("cuda", "GPU-1", "memory of kind cuda, and cpu"), ("cpu", "GPU-1", "lies on GPU 'GPU-1'")],
)
def test_a_slab_of_another_device_is_refused(
    ends: tuple[PeerSocket, PeerSocket], kind: str, gpu: str, problem: str
) -> None:
    fd = memfd(NUM_BYTES)
    ends[0].send(SlabHeader(num_bytes=NUM_BYTES, generation=1, kind=kind, gpu=gpu))  # type: ignore[arg-type]
    ends[0].send_fd(fd)
    os.close(fd)
    with pytest.raises(WeightsError, match=problem):
        MappedSlab.receive(ends[1], CPU)


def test_another_message_is_no_slab(ends: tuple[PeerSocket, PeerSocket]) -> None:
    ends[0].send(EndOfPush(0))
    with pytest.raises(WeightsError, match="rank 3 sent a EndOfPush in place of a slab"):
        MappedSlab.receive(ends[1], CPU)


def test_nobody_can_shrink_the_memory_of_a_slab(
    ends: tuple[PeerSocket, PeerSocket], slab: Slab
) -> None:
    slab.send(ends[0])
    ends[1].receive(60)
    fd = ends[1].receive_fd(60)
    for size in (0, NUM_BYTES - 1, NUM_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    assert int(slab.memory.sum()) == 0


def test_a_slab_has_a_size() -> None:
    for num_bytes in (0, -1, 1 << 60):
        with pytest.raises(WeightsError, match=f"a slab cannot have {num_bytes} bytes"):
            Slab.create(num_bytes, CPU)


def test_a_closed_slab_is_not_sent(ends: tuple[PeerSocket, PeerSocket]) -> None:
    slab = Slab.create(NUM_BYTES, CPU)
    slab.close()
    slab.close()
    with pytest.raises(ResidencyError, match="until it closes it"):
        slab.send(ends[0])


def test_a_portion_of_a_slab_that_was_not_sent_is_refused_by_the_other_process() -> None:
    with peer_process() as (_, (peer,)):
        sent, newer = Slab.create(NUM_BYTES, CPU), Slab.create(NUM_BYTES, CPU)
        order(peer, "slab")
        sent.send(peer)
        assert report(peer).digest == ""
        order(peer, "push")
        writer = PortionWriter(newer, peer, 60)
        assert writer.slot("w", Box((0,), (4,)), (4,), "uint8") is not None
        told, mapped = newer.generation, sent.generation
        expected = f"portion 0 lies in slab {told}, and slab {mapped} is mapped"
        with pytest.raises(WeightsError, match=f"engine of rank 3 .*reports: {expected}"):
            writer.finish()
        assert report(peer).digest == f"StaleSlabError: {expected}"
