"""The rank, seen from a process of hooks: a socket that blocks."""

from __future__ import annotations

import socket

from spmd_rl.controller.channel.codec import Packed, pack
from spmd_rl.hooks.frames import FrameReader, frame
from spmd_rl.hooks.messages import TO_PROCESS, ToProcess, ToRank

_RECEIVE_BYTES = 1 << 20


class RankLink:
    """Receives messages of the rank and sends it others, one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = FrameReader()
        self._frames: list[Packed] = []

    def send(self, message: ToRank) -> None:
        """Send a message. Blocks: until the socket takes it."""
        self.socket.sendall(frame(pack(message)))

    def receive(self) -> ToProcess | None:
        """Return the next message; None once the rank has ended. Blocks: until then."""
        while not self._frames:
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                return None
            self._frames = self._reader.feed(data)
        message: ToProcess = TO_PROCESS.unpack(self._frames.pop(0))
        return message
