"""Endless malformed and mutated frames from a seed; each is wrong for its receiver."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from spmd_rl.controller.channel import messages as wire_messages
from spmd_rl.controller.channel.codec import pack
from spmd_rl.controller.channel.envelope import PREAMBLE, PREAMBLE_BYTES
from spmd_rl.controller.channel.messages import MALFORMED, ChannelMessage
from spmd_rl.mesh.split import Placement

VALUE = pack({"value": [1, 2.5, "x", None, True], "array": np.arange(3)})
PLACEMENT = Placement("actor", (0, 1), {"dp": 1, "fsdp": 2, "tp": 1})
TO_CONTROLLER: list[ChannelMessage] = [
    wire_messages.Hello(1, "host", 77),
    wire_messages.CommandResult(),
    wire_messages.Failure("KeyError", "'x'", "Traceback", 1),
    wire_messages.Pong(),
    wire_messages.Stacks("reward.py:1 in score", "thread", {"replayed": 2}),
    wire_messages.Signalled("SIGTERM"),
    wire_messages.Dying("lost its launcher"),
    wire_messages.Bye(),
]
TO_WORKER: list[ChannelMessage] = [
    wire_messages.Ping(20.0, "runs/run/checkpoints"),
    wire_messages.StackRequest(),
    wire_messages.BuildMeshes([PLACEMENT]),
    wire_messages.Spawn("actor", "m:Actor", PLACEMENT, "m:Config"),
    wire_messages.Call("actor", "go"),
    wire_messages.CallBeside("actor", True),
    wire_messages.Abort(),
    wire_messages.Stop("why", 2, [wire_messages.Hello(1, "host", 5)]),
]
NESTED = b"\x91" * 2000 + b"\xc0"
HUGE_COUNTS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
)


class Fuzzer:
    """Makes wrong frames.

    `decode` is the receiver's. A frame with a valid header gets a preamble that must be refused.
    """

    def __init__(
        self,
        seed: int,
        generation: int,
        messages: Sequence[ChannelMessage],
        decode: Callable[[bytes], object],
    ):
        self._rng = random.Random(seed)
        self._generation = generation
        self._headers = [wire_messages.encode(message) for message in [*TO_CONTROLLER, *TO_WORKER]]
        self._own = [wire_messages.encode(message) for message in messages]
        self._decode = decode

    def frames(self, expected: int) -> list[bytes]:
        """Return one message, of one or more frames.

        A receiver that expects message number `expected` must drop each frame.
        """
        return [self.frame(expected) for _ in range(self._rng.choice([1, 1, 1, 1, 2, 3, 7]))]

    def frame(self, expected: int) -> bytes:
        """Return a frame that a receiver which expects message number `expected` must drop."""
        kind = self._rng.random()
        if kind < 0.1:
            return self._noise(64)
        header = self._header()
        good = self._taken(header)
        preamble = self._noise(PREAMBLE_BYTES)
        if kind > 0.2:
            preamble = self._preamble(expected, len(header), wrong=good or kind < 0.4)
        return preamble + header + b"".join(VALUE) + self._noise(16)

    def _header(self) -> bytes:
        draw = self._rng.random()
        if draw < 0.1:
            return self._noise(256)
        if draw < 0.15:
            return self._rng.choice([NESTED, b"", *HUGE_COUNTS])
        header = bytearray(self._rng.choice(self._own if draw < 0.6 else self._headers))
        for _ in range(self._rng.randrange(4)):
            self._mutate(header)
        return bytes(header)

    def _mutate(self, header: bytearray) -> None:
        at = self._rng.randrange(len(header) + 1)
        match self._rng.randrange(5):
            case 0 if header:
                header[at % len(header)] = self._rng.randrange(256)
            case 1:
                del header[at:]
            case 2:
                header[at:at] = self._noise(8)
            case 3:
                header[at:at] = self._rng.choice(HUGE_COUNTS)
            case _:
                other = self._rng.choice(self._headers)
                header[at:] = other[self._rng.randrange(len(other)) :]

    def _preamble(self, expected: int, header_bytes: int, wrong: bool) -> bytes:
        call, body_at = self._rng.choice([0, 1, 2**64 - 1]), PREAMBLE_BYTES + header_bytes
        places = [body_at, body_at + len(VALUE[0])]
        if not wrong:
            return PREAMBLE.pack(self._generation, expected, call, *places)
        draw = self._rng.random()
        if draw < 0.2:
            places = self._rng.choice(
                [[2**32 - 1, places[1]], [body_at, 2**32 - 1], [body_at, body_at + 1000], [0, 0]]
            )
            return PREAMBLE.pack(self._generation, expected, call, *places)
        if draw < 0.6:
            return PREAMBLE.pack(self._rng.getrandbits(64) ^ 1 or 2, expected, call, *places)
        number = self._rng.choice([expected - 1, expected + 1, 0, expected + 2**40, 2**64 - 1])
        number = number if number not in (expected, -1) else expected + 1
        return PREAMBLE.pack(self._generation, number, call, *places)

    def _noise(self, most: int) -> bytes:
        return self._rng.randbytes(self._rng.randrange(most))

    def _taken(self, header: bytes) -> bool:
        try:
            self._decode(header)
        except MALFORMED:
            return False
        return True
