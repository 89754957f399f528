"""Channel between a rank and a process of hooks: frames over a socket, and a note in shared memory.

The header of a frame holds a mark and two lengths. Bytes that a hook wrote into the socket do not
begin with the mark, so they are noticed. The rank reads in the note which call a process runs,
also while that call hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from typing import Any

from spmd_rl.controller.channel.codec import MAX_BODY_BYTES, MAX_PAYLOAD_BYTES, Codec, pack
from spmd_rl.errors import ContractError

MARK = b"\xc1hk1"  # msgpack never uses this first byte
_HEADER = struct.Struct("<4sIQ")
NO_CALL = -1
_NOTE_BYTES = 16  # the id of the call, and since when it runs


def encode(message: Any) -> bytes:
    """Return the bytes of one frame. Raises: ContractError for what cannot cross."""
    body, payload = pack(message)
    return b"".join((_HEADER.pack(MARK, len(body), len(payload)), body, payload))


class MessageReader:
    """Cuts a stream of bytes into the messages of a codec."""

    def __init__(self, codec: Codec) -> None:
        self.is_garbled = False  # what has come next is no message
        self._codec, self._buffer = codec, bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that these bytes complete, up to what is no message."""
        buffer = self._buffer
        buffer += data
        messages: list[Any] = []
        at, end = 0, len(buffer)
        while end - at >= _HEADER.size and not self.is_garbled:
            mark, body_bytes, payload_bytes = _HEADER.unpack_from(buffer, at)
            if mark != MARK or body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                self.is_garbled = True
                break
            start = at + _HEADER.size
            split, at_next = start + body_bytes, start + body_bytes + payload_bytes
            if at_next > end:
                break
            try:
                packed = bytes(buffer[start:split]), bytes(buffer[split:at_next])
                messages.append(self._codec.unpack(packed))
            except ContractError:
                self.is_garbled = True
            at = at_next
        del buffer[:at]
        return messages


class CallNote:
    """One end of the note. The process writes it, the rank reads it."""

    def __init__(self, descriptor: int) -> None:
        self._values = memoryview(mmap.mmap(descriptor, _NOTE_BYTES)).cast("q")

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new note, in a temporary file without a name."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_NOTE_BYTES)
            descriptor = os.dup(file.fileno())
        CallNote(descriptor).clear()
        return descriptor

    def write(self, call_id: int) -> None:
        """Note that this call runs from now on."""
        # The time goes first: a reader between the two writes takes the older call as the younger.
        self._values[1] = time.monotonic_ns()
        self._values[0] = call_id

    def clear(self) -> None:
        """Note that no call is running."""
        self._values[0] = NO_CALL

    def read(self) -> tuple[int, float]:
        """Return the call that is running, or `NO_CALL`, and since when on the monotonic clock."""
        return self._values[0], self._values[1] / 1e9
