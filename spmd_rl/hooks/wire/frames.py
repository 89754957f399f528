"""Frames of the socket between a rank and a process of hooks: a header, a body and a payload.

The header holds a mark and both lengths. Bytes that a hook wrote into the socket do not begin with
the mark, so they are noticed.
"""

from __future__ import annotations

import struct

from spmd_rl.controller.channel.codec import MAX_BODY_BYTES, MAX_PAYLOAD_BYTES, Packed

MARK = b"\xc1hk1"  # msgpack never uses this first byte
_HEADER = struct.Struct("<4sIQ")


def frame(packed: Packed) -> bytes:
    """Return the bytes of one frame."""
    body, payload = packed
    return b"".join((_HEADER.pack(MARK, len(body), len(payload)), body, payload))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self.is_garbled = False  # what has come next is no frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Packed]:
        """Return the frames that these bytes complete, up to what is no frame."""
        buffer = self._buffer
        buffer += data
        frames: list[Packed] = []
        at, end = 0, len(buffer)
        while end - at >= _HEADER.size:
            mark, body_bytes, payload_bytes = _HEADER.unpack_from(buffer, at)
            if mark != MARK or body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                self.is_garbled = True
                break
            start = at + _HEADER.size
            split, stop = start + body_bytes, start + body_bytes + payload_bytes
            if stop > end:
                break
            frames.append((bytes(buffer[start:split]), bytes(buffer[split:stop])))
            at = stop
        del buffer[:at]
        return frames
