"""Messages in order and once: what each direction of a conversation adds to a header and a value.

A message is one frame. It begins with the preamble: the life of the run, the number of the message
within its direction, the number of the call that it issues or answers, and where body and payload
begin. Only the very next number is taken. A frame that was replayed is refused; when one was lost,
all that follow are, so that no call is ever run out of step, and the silence ends the run.

What differs between two calls of an endpoint is in the preamble and the payload: what came before
is known.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from spmd_rl.controller.channel import codec, wire
from spmd_rl.controller.channel.codec import NOTHING, Packed
from spmd_rl.controller.channel.decode_cache import MAX_KNOWN_BYTES, remember
from spmd_rl.controller.channel.wire import MALFORMED, Refusal

M = TypeVar("M")

PREAMBLE = struct.Struct("<QQQII")
PREAMBLE_BYTES = PREAMBLE.size
# of body and payload: what header and body mean depends on these too
_PLACES_AT = PREAMBLE_BYTES - 8
LARGE_BYTES = 1 << 16
_read_preamble, _write_preamble = PREAMBLE.unpack_from, PREAMBLE.pack


class Outgoing:
    """One direction, at its sender."""

    def __init__(self, generation: int, first: int = 0) -> None:
        self._generation = generation
        self._next = first

    def frame(self, header: bytes, value: Packed = NOTHING, call: int = 0) -> bytes:
        """The next message; `call` is the number of the one that it issues or answers, if any."""
        body, payload = value
        body_at = PREAMBLE_BYTES + len(header)
        number = self._next
        self._next = number + 1
        preamble = _write_preamble(self._generation, number, call, body_at, body_at + len(body))
        return b"".join((preamble, header, body, payload))


class Incoming(Generic[M]):
    """One direction, at its receiver; `refused` counts what it did not take, by `Refusal`.

    `known` has the message and the body of frames that came before, by the bytes that say them;
    directions may share it. Without `first`, the number that comes first is right.
    """

    def __init__(
        self,
        generation: int,
        decode: Callable[[bytes], M],
        known: dict[bytes, tuple[M, bytes]] | None = None,
        first: int | None = 0,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._generation = generation
        self._decode = decode
        self._known = {} if known is None else known
        self._next = first

    def take(self, frame: bytes) -> tuple[M, Packed, int] | None:
        """The message in this frame, its value and its call; None, counted, when it holds none or
        not the next.
        """
        try:
            generation, number, call, body_at, payload_at = _read_preamble(frame)
        except struct.error:
            self.refuse(Refusal.PREAMBLE)
            return None
        if (number != self._next or generation != self._generation) and (
            why := self._stale(generation, number)
        ):
            self.refuse(why)
            return None
        said = (
            self._known.get(frame[_PLACES_AT:payload_at]) if payload_at <= MAX_KNOWN_BYTES else None
        )
        if said is None:
            learned = self._learn(frame, body_at, payload_at)
            if isinstance(learned, Refusal):
                self.refuse(learned)
                return None
            said = learned
        self._next = number + 1
        message, body = said
        if len(frame) < LARGE_BYTES:
            return message, (body, frame[payload_at:]), call
        return message, (body, memoryview(frame)[payload_at:]), call  # type: ignore[return-value]  # and no copy

    def refuse(self, reason: Refusal) -> None:
        """Count what is not taken."""
        self.refused[reason] += 1

    def _stale(self, generation: int, number: int) -> Refusal | None:
        if generation != self._generation:
            return Refusal.GENERATION
        if self._next is None:
            return None
        return Refusal.REPLAYED if number < self._next else Refusal.EARLY

    def _learn(self, frame: bytes, body_at: int, payload_at: int) -> tuple[M, bytes] | Refusal:
        if not PREAMBLE_BYTES <= body_at <= payload_at <= len(frame):
            return Refusal.PREAMBLE
        sizes = body_at - PREAMBLE_BYTES, payload_at - body_at, len(frame) - payload_at
        limits = wire.MAX_HEADER_BYTES, codec.MAX_BODY_BYTES, codec.MAX_PAYLOAD_BYTES
        if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
            return Refusal.OVERSIZE
        try:
            message = self._decode(frame[PREAMBLE_BYTES:body_at])
        except MALFORMED:
            return Refusal.HEADER
        said = message, frame[body_at:payload_at]
        remember(self._known, frame[_PLACES_AT:payload_at], said)
        return said
