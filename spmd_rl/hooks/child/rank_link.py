"""The rank, seen from a process of hooks: messages over a socket."""

from __future__ import annotations

import socket
from collections import deque

from spmd_rl.controller.channel.codec import Packed, pack
from spmd_rl.hooks.wire.frames import FrameReader, frame
from spmd_rl.hooks.wire.messages import TO_PROCESS, ToProcess, ToRank

_RECEIVE_BYTES = 1 << 20


class RankLink:
    """Messages of the rank, in order. While the socket blocks, `receive` and `send` may be used."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = FrameReader()
        self._frames: deque[Packed] = deque()

    def feed(self, data: bytes) -> None:
        """Take bytes that came through the socket."""
        self._frames += self._reader.feed(data)

    def next(self) -> ToProcess | None:
        """Return the next message that has come; None if there is none."""
        message: ToProcess | None = None
        if self._frames:
            message = TO_PROCESS.unpack(self._frames.popleft())
        return message

    def receive(self) -> ToProcess | None:
        """Return the next message; None once the rank has ended. Blocks: until then."""
        while (message := self.next()) is None:
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                return None
            self.feed(data)
        return message

    def send(self, message: ToRank) -> None:
        """Send a message. Blocks: until the socket takes it."""
        self.socket.sendall(frame(pack(message)))
