"""Messages in order and once: what each direction of a conversation adds to a header and a payload.

A message is one frame, or two when its payload is large. It begins with the preamble: the life of the run, the number
of the message within its direction, and the length of its header. Only the very next number is taken. A frame that was
replayed is refused; when one was lost, all that follow are, so that no call is ever run out of step, and the silence
ends the run.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spmd_rl.controller import wire
from spmd_rl.controller.wire import MALFORMED, Refusal

M = TypeVar("M")

PREAMBLE = struct.Struct(">QQI")
PREAMBLE_BYTES = PREAMBLE.size
_read_preamble, _write_preamble = PREAMBLE.unpack_from, PREAMBLE.pack
OWN_FRAME_BYTES = 1 << 16  # payloads from this size on are not copied into the first frame


class Outgoing:
    """One direction, at its sender."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._next = 0

    def frames(self, header: bytes, payload: bytes) -> list[bytes]:
        """The frames of the next message."""
        preamble = _write_preamble(self._generation, self._next, len(header))
        self._next += 1
        if len(payload) < OWN_FRAME_BYTES:
            return [preamble + header + payload]
        return [preamble + header, payload]


class Incoming(Generic[M]):
    """One direction, at its receiver; `refused` counts what it did not take, by `Refusal`."""

    def __init__(self, generation: int, decode: Callable[[bytes], M]) -> None:
        self.refused: Counter[str] = Counter()
        self._generation = generation
        self._decode = decode
        self._next = 0

    def take(self, frames: Sequence[bytes]) -> tuple[M, bytes] | None:
        """The message in these frames and its payload; None, counted, when they hold none or not the next."""
        if not 0 < len(frames) <= 2:
            return self._refused(Refusal.FRAMES)
        first = frames[0]
        if len(first) < PREAMBLE_BYTES:
            return self._refused(Refusal.PREAMBLE)
        generation, number, header_bytes = _read_preamble(first)
        if generation != self._generation:
            return self._refused(Refusal.GENERATION)
        if number != self._next:
            return self._refused(Refusal.REPLAYED if number < self._next else Refusal.EARLY)
        end = PREAMBLE_BYTES + header_bytes
        if end > len(first) or (len(frames) == 2 and end < len(first)):
            return self._refused(Refusal.PREAMBLE)
        payload = frames[1] if len(frames) == 2 else first[end:]
        if header_bytes > wire.MAX_HEADER_BYTES or len(payload) > wire.MAX_PAYLOAD_BYTES:
            return self._refused(Refusal.OVERSIZE)
        try:
            message = self._decode(first[PREAMBLE_BYTES:end])
        except MALFORMED:
            return self._refused(Refusal.HEADER)
        self._next += 1
        return message, payload

    def _refused(self, reason: Refusal) -> tuple[M, bytes] | None:
        self.refused[reason] += 1
        return None
