"""Envelope of a message: it puts header and value in one frame, and numbers the frames in order.

A frame begins with a preamble of five numbers: the generation of the run, the number of the frame
within its direction, the number of the call that it issues or answers, and the offsets of body and
payload. A receiver accepts only the very next number. It refuses a frame that is replayed. After a
frame is lost it refuses all later ones, so that no call runs out of order. The silence then ends
the run.

Two calls of one endpoint differ only in preamble and payload, so header and body are decoded once.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from spmd_rl.controller.channel import codec, messages
from spmd_rl.controller.channel.codec import NOTHING, Packed
from spmd_rl.controller.channel.decode_cache import MAX_KEY_BYTES, store
from spmd_rl.controller.channel.messages import MALFORMED, Refusal

M = TypeVar("M")

PREAMBLE = struct.Struct("<QQQII")
PREAMBLE_BYTES = PREAMBLE.size
# Where the two offsets begin. They are part of a cache key: the meaning of header and body depends
# on them.
_OFFSETS_AT = PREAMBLE_BYTES - 8
LARGE_BYTES = 1 << 16
_read_preamble, _write_preamble = PREAMBLE.unpack_from, PREAMBLE.pack


class EnvelopeWriter:
    """Writes the frames of one direction of a connection."""

    def __init__(self, generation: int, first: int = 0) -> None:
        self._generation = generation
        self._next = first

    def frame(self, header: bytes, value: Packed = NOTHING, call: int = 0) -> bytes:
        """Return the next frame; `call` is the number of the call that it issues or answers."""
        body, payload = value
        body_at = PREAMBLE_BYTES + len(header)
        number = self._next
        self._next = number + 1
        preamble = _write_preamble(self._generation, number, call, body_at, body_at + len(body))
        return b"".join((preamble, header, body, payload))


class EnvelopeReader(Generic[M]):
    """Reads the frames of one direction of a connection; `refused` counts those that it refuses.

    `cache` has the message and the body of earlier frames, by the bytes that encode them; several
    readers may share it. Without `first`, the reader accepts any number for the first frame.
    """

    def __init__(
        self,
        generation: int,
        decode: Callable[[bytes], M],
        cache: dict[bytes, tuple[M, bytes]] | None = None,
        first: int | None = 0,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._generation = generation
        self._decode = decode
        self._cache = {} if cache is None else cache
        self._next = first

    def read(self, frame: bytes) -> tuple[M, Packed, int] | None:
        """Return the message in a frame, its value and its call number.

        Returns None, and counts why, for a frame that holds no message or not the next one.
        """
        try:
            generation, number, call, body_at, payload_at = _read_preamble(frame)
        except struct.error:
            self.refuse(Refusal.PREAMBLE)
            return None
        if (number != self._next or generation != self._generation) and (
            reason := self._stale(generation, number)
        ):
            self.refuse(reason)
            return None
        decoded = (
            self._cache.get(frame[_OFFSETS_AT:payload_at]) if payload_at <= MAX_KEY_BYTES else None
        )
        if decoded is None:
            fresh = self._decode_frame(frame, body_at, payload_at)
            if isinstance(fresh, Refusal):
                self.refuse(fresh)
                return None
            decoded = fresh
        self._next = number + 1
        message, body = decoded
        if len(frame) < LARGE_BYTES:
            return message, (body, frame[payload_at:]), call
        # without copying the payload
        return message, (body, memoryview(frame)[payload_at:]), call  # type: ignore[return-value]

    def refuse(self, reason: Refusal) -> None:
        """Count a refused frame."""
        self.refused[reason] += 1

    def _stale(self, generation: int, number: int) -> Refusal | None:
        if generation != self._generation:
            return Refusal.GENERATION
        if self._next is None:
            return None
        return Refusal.REPLAYED if number < self._next else Refusal.EARLY

    def _decode_frame(
        self, frame: bytes, body_at: int, payload_at: int
    ) -> tuple[M, bytes] | Refusal:
        if not PREAMBLE_BYTES <= body_at <= payload_at <= len(frame):
            return Refusal.PREAMBLE
        if _is_oversize(body_at - PREAMBLE_BYTES, payload_at - body_at, len(frame) - payload_at):
            return Refusal.OVERSIZE
        try:
            message = self._decode(frame[PREAMBLE_BYTES:body_at])
        except MALFORMED:
            return Refusal.HEADER
        decoded = message, frame[body_at:payload_at]
        store(self._cache, frame[_OFFSETS_AT:payload_at], decoded)
        return decoded


def _is_oversize(header_bytes: int, body_bytes: int, payload_bytes: int) -> bool:
    return (
        header_bytes > messages.MAX_HEADER_BYTES
        or body_bytes > codec.MAX_BODY_BYTES
        or payload_bytes > codec.MAX_PAYLOAD_BYTES
    )
