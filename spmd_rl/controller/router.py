"""The controller's socket thread: one ROUTER, admitting by CURVE the one client key of this run."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from signal import Signals
from typing import Protocol

import zmq
from zmq.utils import z85

from spmd_rl.controller.envelope import Incoming, Outgoing
from spmd_rl.controller.secret import Keys
from spmd_rl.controller.waker import Waker
from spmd_rl.controller.wire import (
    MAX_PAYLOAD_BYTES,
    Message,
    Refusal,
    ToController,
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

    def on_signal(self, number: Signals) -> None:
        """Somebody wants the controller to end."""


class Router:
    """Owns every ZeroMQ socket of the controller. `post` may be called from any thread."""

    def __init__(
        self,
        address: str,
        keys: Keys,
        generation: int,
        world_size: int,
        listener: Listener,
        lifeline: socket.socket,
    ) -> None:
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = _server_socket(self._context, keys)
        self._router.bind(address)
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._unknown: Counter[str] = Counter()
        self._ranks = {b"rank-%d" % rank: rank for rank in range(world_size)}
        self._incoming = [Incoming(generation, decode_at_controller) for _ in range(world_size)]
        self._outgoing = [Outgoing(generation) for _ in range(world_size)]
        self._client_key = keys.client.public
        self._listener = listener
        self._lifeline = lifeline
        self._outbox: deque[tuple[int, bytes, bytes]] = deque()
        self._waker = Waker()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)

    def start(self) -> None:
        """Begin to listen; the listener has to be ready."""
        self._thread.start()

    @property
    def refused(self) -> Counter[str]:
        """How many frames were dropped, by reason."""
        return sum((incoming.refused for incoming in self._incoming), Counter(self._unknown))

    def refused_of(self, rank: int) -> Counter[str]:
        """How many of one rank's frames were dropped, by reason."""
        return self._incoming[rank].refused

    def take_signals(self, *numbers: Signals) -> None:
        """Have these signals go to the listener. Call it on the main thread only."""
        self._waker.take_signals(*numbers)

    def post(self, ranks: Sequence[int], message: Message, payload: bytes = b"") -> None:
        """Queue a message to each of `ranks`, in order with all others."""
        header, payload = encode(message, payload)
        self._outbox.extend((rank, header, payload) for rank in ranks)
        self._waker.wake()

    def close(self) -> None:
        """Send what is queued and end the thread.

        Blocks: for the sockets' linger at most.
        """
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def take(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Act on what the socket received. Runs on this object's thread."""
        rank = self._ranks.get(identity)
        if rank is None:
            self._unknown[Refusal.STRANGER] += 1
        elif (taken := self._incoming[rank].take(frames)) and not self._listener.on_message(rank, *taken):
            self._incoming[rank].refused[Refusal.UNASKED] += 1

    def _run(self) -> None:
        poller = zmq.Poller()
        handlers: dict[object, Callable[[], None]] = {
            self._router: self._receive,
            self._zap: self._admit,
            self._waker.fileno(): self._woken,
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

    def _woken(self) -> None:
        for number in self._waker.drain():
            self._listener.on_signal(number)
        self._send()

    def _send(self) -> None:
        while self._outbox:
            rank, header, payload = self._outbox.popleft()
            frames = self._outgoing[rank].frames(header, payload)
            try:
                self._router.send_multipart([b"rank-%d" % rank, *frames], zmq.DONTWAIT)
            except zmq.ZMQError:  # no such peer any more: what is sent to it is lost, so it is too
                self._listener.on_unreachable(rank)

    def _receive(self) -> None:
        identity, *frames = self._router.recv_multipart()
        self.take(identity, frames)

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
    router.sndhwm = 0  # what is sent is bounded by what was asked; what is received, by ZeroMQ's default of 1000
    return router
