"""Socket between a rank and the process that generates on its GPU.

It carries messages and file descriptors over one end of a socketpair. A frame is a length of four
bytes, most significant first, and as many bytes of msgpack. A frame of length 0 carries one file
descriptor. The set of messages is closed: anything else is refused and closes the socket, so that
nobody reads on in the middle of a frame.

A pickle begins with the byte 0x80. As a length that is more than any message has, and as a message
it is refused.
"""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Iterable
from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta, Struct

from spmd_rl.errors import DeadlineError, LostRankError, WeightsError
from spmd_rl.weights.plan.layout import Box, Dims

MAX_MESSAGE_BYTES = 16 << 20
MAX_SLAB_BYTES = 1 << 44
SEND_DEADLINE_S = 60.0
PICKLE_START = b"\x80"
_LENGTH_BYTES = 4
_RECEIVE_FLAGS = socket.MSG_CMSG_CLOEXEC

Count = Annotated[int, Meta(ge=0)]
NumBytes = Annotated[int, Meta(ge=1, le=MAX_SLAB_BYTES)]


class PeerMessage(Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. On the wire a message is an array that begins with its class's name."""


class SlabHeader(PeerMessage, frozen=True):
    """Announcement of a slab, whose file descriptor follows. `gpu` is the UUID of the GPU that it
    lies on, "" for memory of the host.
    """

    num_bytes: NumBytes
    generation: Count
    kind: Literal["cpu", "cuda"]
    gpu: str


class PortionEntry(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One box of a tensor, which has the global `shape`, and the byte of the slab where it lies."""

    name: str
    box: Box
    dtype: str
    shape: Dims
    offset: Count


class PortionTable(PeerMessage, frozen=True):
    """The boxes that lie in half `half` of the slab now. Portions of a push are numbered from 0.

    The reader keeps the table of each portion under `table_id`, until another comes for it.
    """

    generation: Count
    number: Count
    half: Literal[0, 1]
    table_id: Count
    entries: list[PortionEntry]


class RepeatedPortion(PeerMessage, frozen=True):
    """The boxes of table `table_id`, which came for this portion before, lie in the slab now."""

    generation: Count
    number: Count
    half: Literal[0, 1]
    table_id: Count


class PortionAck(PeerMessage, frozen=True):
    """The reader needs portion `number` of this slab no more."""

    generation: Count
    number: Count


class EndOfPush(PeerMessage, frozen=True):
    """The push had this many portions."""

    num_portions: Count


class PeerFailure(PeerMessage, frozen=True):
    """The sender cannot go on. The receiver raises a WeightsError with this sentence."""

    sentence: str


MESSAGES: tuple[type[PeerMessage], ...] = (
    SlabHeader,
    PortionTable,
    RepeatedPortion,
    PortionAck,
    EndOfPush,
    PeerFailure,
)


class PeerSocket:
    """One end of a stream socketpair. `peer` names the process at the other end in errors.

    `extra` are further classes of messages that belong to the set; both ends pass the same.
    No method may be called by two threads at once.
    """

    def __init__(
        self, sock: socket.socket, peer: str, extra: Iterable[type[PeerMessage]] = ()
    ) -> None:
        sock.set_inheritable(False)
        self.peer = peer
        self._socket = sock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Union[*MESSAGES, *extra]).decode
        self._fds: list[int] = []  # that came with the current frame

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once the socket is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        self._close_fds()
        self._socket.close()

    def send(self, message: PeerMessage, deadline_s: float = SEND_DEADLINE_S) -> None:
        """Send one message.

        Blocks: until the socket's buffer has room; the peer reads it.
        Raises: LostRankError when the peer is gone, DeadlineError when it does not read.
        """
        payload = self._encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise WeightsError(f"a message of {len(payload)} bytes is too long for {self.peer}")
        self._send_frame(payload, (), deadline_s)

    def send_fd(self, fd: int, deadline_s: float = SEND_DEADLINE_S) -> None:
        """Send a file descriptor; the caller still owns its own. Blocks and raises as `send`."""
        self._send_frame(b"", (fd,), deadline_s)

    def receive(self, deadline_s: float) -> PeerMessage:
        """Return the next message.

        Blocks: until it is there; the peer sends it.
        Raises: LostRankError when the peer is gone, DeadlineError after `deadline_s`, WeightsError
        when what came is no message, or when the peer reports a failure.
        """
        payload = self._receive_frame(deadline_s)
        if self._fds or not payload:
            raise self._refused("a file descriptor came where a message was expected")
        if payload[:1] == PICKLE_START:
            raise self._refused("a message begins with 0x80, as a pickle does")
        try:
            message: PeerMessage = self._decode(payload)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._refused(f"a message cannot be read: {error}") from error
        if isinstance(message, PeerFailure):
            raise WeightsError(f"{self.peer} reports: {message.sentence}")
        return message

    def receive_fd(self, deadline_s: float) -> int:
        """Return a file descriptor, which the caller now owns. Blocks and raises as `receive`."""
        payload = self._receive_frame(deadline_s)
        if payload or len(self._fds) != 1:
            raise self._refused(
                f"{len(self._fds)} file descriptors and a message of {len(payload)} bytes came "
                "where one file descriptor was expected"
            )
        return self._fds.pop()

    def _send_frame(self, payload: bytes, fds: tuple[int, ...], deadline_s: float) -> None:
        data = memoryview(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        end = time.monotonic() + deadline_s
        while data:
            self._wait_at_most(end, deadline_s, "read")
            try:
                sent = self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost(error) from error
            data, ancillary = data[sent:], []

    def _receive_frame(self, deadline_s: float) -> bytes:
        """Return the payload of the next frame. Descriptors that come with it are in `_fds`."""
        end = time.monotonic() + deadline_s
        length = int.from_bytes(self._receive_bytes(_LENGTH_BYTES, end, deadline_s), "big")
        if length > MAX_MESSAGE_BYTES:
            raise self._refused(f"a message of {length} bytes is announced")
        return bytes(self._receive_bytes(length, end, deadline_s))

    def _receive_bytes(self, num_bytes: int, end: float, deadline_s: float) -> bytearray:
        received = bytearray()
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        while len(received) < num_bytes:
            self._wait_at_most(end, deadline_s, "answer")
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    num_bytes - len(received), room, _RECEIVE_FLAGS
                )
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost(error) from error
            self._keep_fds(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise self._refused("more file descriptors came than one")
            if not data:
                raise self._lost(None)
            received += data
        return received

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)

    def _wait_at_most(self, end: float, deadline_s: float, verb: str) -> None:
        """Set the time-out of the next call. A frame that is cut off cannot be taken up again."""
        if self._socket.fileno() < 0:
            raise LostRankError(f"the socket to {self.peer} is closed")
        left = end - time.monotonic()
        if left <= 0:
            self.close()
            raise DeadlineError(f"{self.peer} did not {verb} within {deadline_s:g} s")
        self._socket.settimeout(left)

    def _refused(self, problem: str) -> WeightsError:
        self.close()
        return WeightsError(f"{problem}, from {self.peer}")

    def _lost(self, error: OSError | None) -> LostRankError:
        self.close()
        reason = f" ({error.strerror})" if error is not None and error.strerror else ""
        return LostRankError(f"{self.peer} closed its end of the socket{reason}")

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
