"""ZAP (ZeroMQ RFC 27): admits connections that hold the client key of this run, and no others."""

from __future__ import annotations

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ sends its requests


class Authenticator:
    """Answers the requests of one ZeroMQ context, which come to `socket`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_key: bytes) -> None:
        self._client_key = client_key
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ENDPOINT)

    def answer(self) -> None:
        """Answer the next request, which says version, id, domain, address, identity, mechanism
        and key.
        """
        version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        keys = [z85.encode(key) for key in credentials]
        admitted = mechanism == b"CURVE" and keys == [self._client_key]
        status = [b"200", b"OK"] if admitted else [b"400", b"unknown key"]
        self.socket.send_multipart([version, request, *status, b"", b""])
