"""Messages of one frame on ZeroMQ sockets, at what ZeroMQ itself takes."""

from __future__ import annotations

import zmq

_LAST = int(zmq.DONTWAIT)
_LATER = int(zmq.DONTWAIT | zmq.SNDMORE)
_send = zmq.backend.Socket.send  # that of zmq.Socket looks for options of draft sockets first


def send(socket: zmq.Socket[bytes], frame: bytes) -> None:
    """Send a message; it waits for a slow peer in memory."""
    _send(socket, frame, _LAST)


def send_to(socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> None:
    """Send a message to the peer of that identity. Raises: ZMQError when there is none."""
    _send(socket, identity, _LATER)
    _send(socket, frame, _LAST)
