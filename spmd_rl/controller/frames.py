"""Whole messages on a ZeroMQ socket. `recv_multipart` asks the socket after each frame whether one follows, which
takes longer than the frame does."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

_LAST = int(zmq.DONTWAIT)
_LATER = int(zmq.DONTWAIT | zmq.SNDMORE)
_send = zmq.backend.Socket.send  # that of zmq.Socket looks for options of draft sockets first


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of the next message, or those that are left of it. Blocks: unless the socket is readable."""
    frame = socket.recv(0, False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(0, False)
        frames.append(frame.bytes)
    return frames


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes], to: bytes | None = None) -> None:
    """Send one frame, or two, as one message, to the peer of that identity; they wait for a slow peer in memory."""
    if to is not None:
        _send(socket, to, _LATER)
    if len(frames) > 1:
        _send(socket, frames[0], _LATER)
    _send(socket, frames[-1], _LAST)
