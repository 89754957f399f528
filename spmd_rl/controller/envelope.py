"""Messages in order and once: what each direction of a conversation adds to a header and a payload.

The first of a message's three frames, the preamble, names the life of the run and the message's number within its
direction. Only the very next number is taken. A frame that was replayed is refused; when one was lost, all that
follow are, so that no call is ever run out of step, and the silence ends the run.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spmd_rl.controller import wire
from spmd_rl.controller.wire import Refusal, WireError

M = TypeVar("M")

PREAMBLE = struct.Struct(">QQ")


class Outgoing:
    """One direction, at its sender."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._next = 0

    def frames(self, header: bytes, payload: bytes) -> list[bytes]:
        """The frames of the next message."""
        number, self._next = self._next, self._next + 1
        return [PREAMBLE.pack(self._generation, number), header, payload]


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
        if len(frames) != 3:
            raise WireError(Refusal.FRAMES)
        preamble, header, payload = frames
        if len(preamble) != PREAMBLE.size:
            raise WireError(Refusal.PREAMBLE)
        generation, number = PREAMBLE.unpack(preamble)
        if generation != self._generation:
            raise WireError(Refusal.GENERATION)
        if number != self._next:
            raise WireError(Refusal.REPLAYED if number < self._next else Refusal.EARLY)
        if len(header) > wire.MAX_HEADER_BYTES or len(payload) > wire.MAX_PAYLOAD_BYTES:
            raise WireError(Refusal.OVERSIZE)
        return header, payload
