"""Whole messages on a ZeroMQ socket. `recv_multipart` asks the socket after each frame whether one follows, which
takes longer than the frame does."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

_LATER = zmq.DONTWAIT | zmq.SNDMORE
_send = zmq.backend.Socket.send  # that of zmq.Socket looks for options of draft sockets first


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of the next message, or those that are left of it. Blocks: unless the socket is readable."""
    frame = socket.recv(copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.bytes)
    return frames


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send the frames as one message, or as the rest of one; they wait for a slow peer in memory."""
    for frame in frames[:-1]:
        _send(socket, frame, _LATER)
    _send(socket, frames[-1], zmq.DONTWAIT)
