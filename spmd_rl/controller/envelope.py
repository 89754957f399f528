"""Messages in order and once: what each direction of a conversation adds to a header and a value.

A message is one frame, or two when its payload is large. It begins with the preamble: the life of the run, the number
of the message within its direction, the number of the call that it issues or answers, and the lengths of what follows.
Only the very next number is taken. A frame that was replayed is refused; when one was lost, all that follow are, so
that no call is ever run out of step, and the silence ends the run.

What differs between two calls of an endpoint is in the preamble and the value: a header that came before is known.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spmd_rl.controller import codec, wire
from spmd_rl.controller.codec import NOTHING, Packed
from spmd_rl.controller.known import remember
from spmd_rl.controller.wire import MALFORMED, Refusal

M = TypeVar("M")

PREAMBLE = struct.Struct(">QQQII")
PREAMBLE_BYTES = PREAMBLE.size
_read_preamble, _write_preamble = PREAMBLE.unpack_from, PREAMBLE.pack
OWN_FRAME_BYTES = 1 << 16  # payloads from this size on are not copied into the first frame


class Outgoing:
    """One direction, at its sender."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._next = 0

    def frames(self, header: bytes, value: Packed = NOTHING, call: int = 0) -> list[bytes]:
        """The frames of the next message; `call` is the number of the one that it issues or answers, if any."""
        body, payload = value.body, value.payload
        preamble = _write_preamble(self._generation, self._next, call, len(header), len(body))
        self._next += 1
        if len(payload) < OWN_FRAME_BYTES:
            return [preamble + header + body + payload]
        return [preamble + header + body, payload]


class Incoming(Generic[M]):
    """One direction, at its receiver; `refused` counts what it did not take, by `Refusal`."""

    def __init__(self, generation: int, decode: Callable[[bytes], M]) -> None:
        self.refused: Counter[str] = Counter()
        self._generation = generation
        self._decode = decode
        self._known: dict[bytes, M] = {}
        self._next = 0

    def take(self, frames: Sequence[bytes]) -> tuple[M, Packed, int] | None:
        """The message in these frames, its value and its call; None, counted, when they hold none or not the next."""
        num_frames = len(frames)
        if num_frames != 1 and num_frames != 2:
            return self._refused(Refusal.FRAMES)
        first = frames[0]
        if len(first) < PREAMBLE_BYTES:
            return self._refused(Refusal.PREAMBLE)
        generation, number, call, header_bytes, body_bytes = _read_preamble(first)
        if generation != self._generation:
            return self._refused(Refusal.GENERATION)
        if number != self._next:
            return self._refused(Refusal.REPLAYED if number < self._next else Refusal.EARLY)
        middle = PREAMBLE_BYTES + header_bytes
        end = middle + body_bytes
        if end > len(first) or (num_frames == 2 and end < len(first)):
            return self._refused(Refusal.PREAMBLE)
        payload = first[end:] if num_frames == 1 else frames[1]
        if body_bytes > codec.MAX_BODY_BYTES or len(payload) > codec.MAX_PAYLOAD_BYTES:
            return self._refused(Refusal.OVERSIZE)
        header = first[PREAMBLE_BYTES:middle]
        message = self._known.get(header)
        if message is None:
            if header_bytes > wire.MAX_HEADER_BYTES:
                return self._refused(Refusal.OVERSIZE)
            try:
                message = self._decode(header)
            except MALFORMED:
                return self._refused(Refusal.HEADER)
            remember(self._known, header, message)
        self._next += 1
        return message, Packed(first[middle:end], payload), call

    def _refused(self, reason: Refusal) -> tuple[M, Packed, int] | None:
        self.refused[reason] += 1
        return None
