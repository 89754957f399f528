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
from spmd_rl.controller.wire import Refusal, WireError

M = TypeVar("M")

PREAMBLE = struct.Struct(">QQI")
OWN_FRAME_BYTES = 1 << 16  # payloads from this size on are not copied into the first frame


class Outgoing:
    """One direction, at its sender."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._next = 0

    def frames(self, header: bytes, payload: bytes) -> list[bytes]:
        """The frames of the next message."""
        first = PREAMBLE.pack(self._generation, self._next, len(header)) + header
        self._next += 1
        return [first + payload] if len(payload) < OWN_FRAME_BYTES else [first, payload]


class Incoming(Generic[M]):
    """One direction, at its receiver; `refused` counts what it did not take, by `Refusal`."""

    def __init__(self, generation: int, decode: Callable[[bytes], M]) -> None:
        self.refused: Counter[str] = Counter()
        self._generation = generation
        self._decode = decode
        self._next = 0

    def take(self, frames: Sequence[bytes]) -> tuple[M, bytes] | None:
        """The message in these frames and its payload; None, counted, when they hold none or not the next."""
        try:
            header, payload = self._opened(frames)
            message = self._decode(header)
        except WireError as error:
            self.refused[error.refusal] += 1
            return None
        self._next += 1
        return message, payload

    def _opened(self, frames: Sequence[bytes]) -> tuple[bytes, bytes]:
        if not 0 < len(frames) <= 2:
            raise WireError(Refusal.FRAMES)
        first = frames[0]
        if len(first) < PREAMBLE.size:
            raise WireError(Refusal.PREAMBLE)
        generation, number, header_bytes = PREAMBLE.unpack_from(first)
        if generation != self._generation:
            raise WireError(Refusal.GENERATION)
        if number != self._next:
            raise WireError(Refusal.REPLAYED if number < self._next else Refusal.EARLY)
        end = PREAMBLE.size + header_bytes
        if end > len(first) or (len(frames) == 2 and end < len(first)):
            raise WireError(Refusal.PREAMBLE)
        payload = frames[1] if len(frames) == 2 else first[end:]
        if header_bytes > wire.MAX_HEADER_BYTES or len(payload) > wire.MAX_PAYLOAD_BYTES:
            raise WireError(Refusal.OVERSIZE)
        return first[PREAMBLE.size : end], payload
