"""ZeroMQ's own send, and its flags for messages of one frame."""

from __future__ import annotations

import zmq

LAST = int(zmq.DONTWAIT)  # a message for a slow peer is kept in memory
# for an identity: the next frame goes to that peer; sending fails if there is none
LATER = int(zmq.DONTWAIT | zmq.SNDMORE)
# send(socket, bytes, LAST or LATER); zmq.Socket.send is slower, as it checks for draft options
send = zmq.backend.Socket.send
