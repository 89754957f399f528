"""Messages of one frame on ZeroMQ sockets, at what ZeroMQ itself takes."""

from __future__ import annotations

import zmq

LAST = int(zmq.DONTWAIT)  # a message waits for a slow peer in memory
LATER = int(zmq.DONTWAIT | zmq.SNDMORE)  # for an identity: what follows goes to that peer, and there may be none
send = zmq.backend.Socket.send  # (socket, bytes, LAST or LATER); that of zmq.Socket looks for draft options first
