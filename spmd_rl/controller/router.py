"""The controller's socket thread: one ROUTER, admitting by CURVE the one client key of this run."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils import z85

from spmd_rl.controller.secret import Keys
from spmd_rl.controller.waker import Waker
from spmd_rl.controller.wire import (
    MAX_PAYLOAD_BYTES,
    Message,
    ToController,
    WireError,
    decode_at_controller,
    encode,
)

TICK_MS = 250


class Listener(Protocol):
    """What the thread reports to; every method runs on it and must not block."""

    def on_message(self, rank: int, message: ToController, payload: bytes) -> bool:
        """Take a message; False counts it as dropped."""

    def on_tick(self, now: float) -> None:
        """Called a few times a second."""

    def on_unreachable(self, rank: int) -> None:
        """A message could not be sent: the connection of `rank` is closed."""

    def on_parent_lost(self) -> None:
        """Rank 0, which started the controller, is gone."""


class Router:
    """Owns every ZeroMQ socket of the controller. `post` may be called from any thread."""

    def __init__(self, address: str, keys: Keys, generation: int, listener: Listener, lifeline: socket.socket) -> None:
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = _server_socket(self._context, keys)
        self._router.bind(address)
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.dropped: Counter[str] = Counter()
        self._generation = generation
        self._client_key = keys.client.public
        self._listener = listener
        self._lifeline = lifeline
        self._outbox: deque[list[bytes]] = deque()
        self._waker = Waker()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def post(self, ranks: list[int] | tuple[int, ...], message: Message, payload: bytes = b"") -> None:
        """Queue a message to each of `ranks`, in order with all others."""
        frames = encode(self._generation, message, payload)
        self._outbox.extend([_identity(rank), *frames] for rank in ranks)
        self._waker.wake()

    def close(self) -> None:
        """Send what is queued and end the thread.

        Blocks: for the sockets' linger at most.
        """
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        handlers: dict[object, Callable[[], None]] = {
            self._router: self._receive,
            self._zap: self._admit,
            self._waker.fileno(): self._send,
            self._lifeline.fileno(): lambda: self._parent_lost(poller),
        }
        for source in handlers:
            poller.register(source, zmq.POLLIN)
        next_tick = 0.0
        while not self._closing:
            ready = poller.poll(TICK_MS)
            for source, _ in ready:
                handlers[source]()
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + TICK_MS / 1000
                self._listener.on_tick(now)
        self._send()
        self._context.destroy(linger=1000)

    def _send(self) -> None:
        self._waker.drain()
        while self._outbox:
            identity, *frames = self._outbox.popleft()
            try:
                self._router.send_multipart([identity, *frames], zmq.DONTWAIT)
            except zmq.ZMQError:  # no such peer any more: what is sent to it is lost, so it is too
                self._listener.on_unreachable(_rank(identity))

    def _receive(self) -> None:
        identity, *frames = self._router.recv_multipart()
        try:
            message, payload = decode_at_controller(self._generation, frames)
            rank = _rank(identity)
        except WireError as error:
            self.dropped[str(error)] += 1
            return
        if not self._listener.on_message(rank, message, payload):
            self.dropped[f"unasked {type(message).__name__}"] += 1

    def _admit(self) -> None:
        """Answer one ZAP request (ZeroMQ RFC 27): version, id, domain, address, identity, mechanism, key."""
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and [z85.encode(key) for key in credentials] == [self._client_key]
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _parent_lost(self, poller: zmq.Poller) -> None:
        poller.unregister(self._lifeline.fileno())
        self._listener.on_parent_lost()


def _server_socket(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = keys.server.private
    router.zap_domain = b"spmd_rl"
    router.router_mandatory = True
    router.maxmsgsize = MAX_PAYLOAD_BYTES
    router.sndhwm = router.rcvhwm = 0
    return router


def _identity(rank: int) -> bytes:
    return b"rank-%d" % rank


def _rank(identity: bytes) -> int:
    if not identity.startswith(b"rank-") or not identity[5:].isdigit():
        raise WireError("unknown identity")
    return int(identity[5:])
