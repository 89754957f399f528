"""Messages of one frame on ZeroMQ sockets, at what ZeroMQ itself takes."""

from __future__ import annotations

import zmq

LAST = int(zmq.DONTWAIT)  # a message waits for a slow peer in memory
# for an identity: what follows goes to that peer, and there may be none
LATER = int(zmq.DONTWAIT | zmq.SNDMORE)
# (socket, bytes, LAST or LATER); that of zmq.Socket looks for draft options first
send = zmq.backend.Socket.send
