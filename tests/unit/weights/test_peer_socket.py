"""PeerSocket: what it carries, what it refuses, and how it says that the peer is gone."""

from __future__ import annotations

import array
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.errors import DeadlineError, LostRankError, WeightsError
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.slab.peer_socket import (
    MAX_MESSAGE_BYTES,
    EndOfPush,
    PeerFailure,
    PeerMessage,
    PeerSocket,
    PortionAck,
    PortionEntry,
    PortionTable,
    SlabHeader,
)

DEADLINE_S = 60.0
SOON_S = 0.05
TABLE = PortionTable(7, 0, 1, 5, [PortionEntry("w", Box((2, 0), (1, 4)), "bfloat16", (3, 4), 256)])
HEADER = SlabHeader(num_bytes=4096, generation=1, kind="cpu", gpu="")


class Hello(PeerMessage, frozen=True):
    """A message of the test's own."""

    text: str


@pytest.fixture
def ends() -> Iterator[tuple[PeerSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    peer = PeerSocket(ours, "engine of rank 3", (Hello,))
    yield peer, theirs
    peer.close()
    theirs.close()


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "message",
    [
        HEADER,
        TABLE,
        PortionAck(7, 12),
        EndOfPush(3),
        Hello("there"),
    ],
)
def test_a_message_arrives(ends: tuple[PeerSocket, socket.socket], message: PeerMessage) -> None:
    peer, theirs = ends
    PeerSocket(theirs, "rank 3", (Hello,)).send(message)
    assert peer.receive(DEADLINE_S) == message


def test_a_long_message_arrives_in_pieces(ends: tuple[PeerSocket, socket.socket]) -> None:
    peer, theirs = ends
    message = Hello("x" * (MAX_MESSAGE_BYTES - 100))
    sender = threading.Thread(target=PeerSocket(theirs, "rank 3", (Hello,)).send, args=(message,))
    sender.start()
    assert peer.receive(DEADLINE_S) == message
    sender.join()
    with pytest.raises(WeightsError, match="too long for engine of rank 3"):
        peer.send(Hello("x" * MAX_MESSAGE_BYTES))


def test_a_file_descriptor_arrives(ends: tuple[PeerSocket, socket.socket]) -> None:
    peer, theirs = ends
    read_end, write_end = os.pipe()
    PeerSocket(theirs, "rank 3").send_fd(write_end)
    os.close(write_end)
    fd = peer.receive_fd(DEADLINE_S)
    assert not os.get_inheritable(fd)
    os.write(fd, b"here")
    os.close(fd)
    assert os.read(read_end, 10) == b"here"
    os.close(read_end)


def test_a_socket_is_not_inherited(ends: tuple[PeerSocket, socket.socket]) -> None:
    peer, theirs = ends
    theirs.set_inheritable(True)
    assert not os.get_inheritable(PeerSocket(theirs, "rank 3").fileno())
    assert not os.get_inheritable(peer.fileno())


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (framed(pickle.dumps({"weights": 1})), "begins with 0x80, as a pickle does"),
        (pickle.dumps({"weights": 1}), "bytes is announced"),
        (framed(b"\x80"), "begins with 0x80"),
        (framed(b"\xc1"), "cannot be read"),
        (framed(msgspec.msgpack.encode(["Order", 1])), "cannot be read"),
        (framed(msgspec.msgpack.encode(["SlabHeader", -1, 1, "cpu", ""])), "cannot be read"),
        (framed(msgspec.msgpack.encode(["SlabHeader", 0, 1, "cpu", ""])), "cannot be read"),
        (framed(msgspec.msgpack.encode(["SlabHeader", 1 << 62, 1, "cpu", ""])), "cannot be read"),
        (framed(msgspec.msgpack.encode(["SlabHeader", 1, -1, "cpu", ""])), "cannot be read"),
        (framed(msgspec.msgpack.encode(["SlabHeader", 1, 1, "disk", ""])), "cannot be read"),
        (framed(msgspec.msgpack.encode(["SlabHeader", 1, 1, "cpu", "", 0])), "cannot be read"),
        (framed(msgspec.msgpack.encode(["PortionTable", 1, 0, 2, 1, []])), "cannot be read"),
        (framed(msgspec.msgpack.encode(EndOfPush(1)) + b"\0"), "cannot be read"),
        (framed(b""), "a file descriptor came where a message was expected"),
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), f"{MAX_MESSAGE_BYTES + 1} bytes is announced"),
    ],
    ids=str,
)
def test_what_is_no_message_is_refused(
    ends: tuple[PeerSocket, socket.socket], sent: bytes, problem: str
) -> None:
    peer, theirs = ends
    theirs.sendall(sent)
    with pytest.raises(WeightsError, match=f"{problem}.*, from engine of rank 3"):
        peer.receive(DEADLINE_S)
    with pytest.raises(LostRankError, match="the socket to engine of rank 3 is closed"):
        peer.receive(DEADLINE_S)
    assert peer.fileno() == -1


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([HEADER, TABLE, PortionAck(7, 1)]), st.data())
def test_flipped_bytes_are_a_message_or_an_error_of_ours(
    message: PeerMessage, data: st.DataObject
) -> None:
    payload = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    ours, theirs = socket.socketpair()
    peer = PeerSocket(ours, "engine of rank 3")
    theirs.sendall(framed(bytes(payload)))
    with suppress(WeightsError):
        assert isinstance(peer.receive(DEADLINE_S), PeerMessage)
    peer.close()
    theirs.close()


def test_deep_nesting_is_refused(ends: tuple[PeerSocket, socket.socket]) -> None:
    peer, theirs = ends
    box = b"\x83\xa6offset\x90\xa6extent\x90\xa1x" + b"\x91" * 50_000 + b"\xc0"
    entry = b"\x95\xa1w" + box + b"\xa5uint8\x90\x00"
    table = b"\x96\xabPortionTable\x07\x00\x01\x05\x91" + entry
    theirs.sendall(framed(table))
    with pytest.raises(WeightsError, match="cannot be read"):
        peer.receive(DEADLINE_S)


@pytest.mark.parametrize("num_fds", [1, 2, 20])
def test_descriptors_that_nobody_asked_for_are_closed(
    ends: tuple[PeerSocket, socket.socket], num_fds: int
) -> None:
    peer, theirs = ends
    before = open_fds()
    fds = array.array("i", [theirs.fileno()] * num_fds)
    message = framed(msgspec.msgpack.encode(EndOfPush(1)))
    theirs.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    with pytest.raises(WeightsError, match="file descriptor"):
        peer.receive(DEADLINE_S)
    assert open_fds() == before - 1  # the socket itself


def test_a_message_is_no_descriptor(ends: tuple[PeerSocket, socket.socket]) -> None:
    peer, theirs = ends
    theirs.sendall(framed(b"\x91\xa1x"))
    with pytest.raises(WeightsError, match="0 file descriptors and a message of 3 bytes came"):
        peer.receive_fd(DEADLINE_S)


def test_a_failure_of_the_peer_is_raised_with_its_words(
    ends: tuple[PeerSocket, socket.socket],
) -> None:
    peer, theirs = ends
    PeerSocket(theirs, "rank 3").send(PeerFailure("no tensor 'w'"))
    with pytest.raises(WeightsError, match="engine of rank 3 reports: no tensor 'w'"):
        peer.receive(DEADLINE_S)


def test_a_silent_peer_is_named(ends: tuple[PeerSocket, socket.socket]) -> None:
    peer, theirs = ends
    theirs.sendall(framed(b"\x91\xa1x")[:5])
    with pytest.raises(DeadlineError, match=r"engine of rank 3 did not answer within 0\.05 s"):
        peer.receive(SOON_S)


def test_a_peer_that_does_not_read_is_named(ends: tuple[PeerSocket, socket.socket]) -> None:
    peer, _ = ends
    with pytest.raises(DeadlineError, match=r"engine of rank 3 did not read within 0\.05 s"):
        peer.send(Hello("x" * (MAX_MESSAGE_BYTES - 100)), SOON_S)


@pytest.mark.parametrize("sent", [b"", framed(b"\x91\xa1x")[:2], framed(b"\x91\xa1x")[:5]], ids=str)
def test_a_peer_that_closes_is_named(ends: tuple[PeerSocket, socket.socket], sent: bytes) -> None:
    peer, theirs = ends
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(LostRankError, match="engine of rank 3 closed its end"):
        peer.receive(DEADLINE_S)


def test_sending_to_a_peer_that_closed_is_an_error(
    ends: tuple[PeerSocket, socket.socket],
) -> None:
    peer, theirs = ends
    theirs.close()
    with pytest.raises(LostRankError, match="engine of rank 3 closed its end"):
        peer.send(EndOfPush(1))
