"""The controller's sockets: one ROUTER, admitting by CURVE the one client key of this run."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from signal import Signals
from typing import Protocol

import zmq
from zmq.utils import z85

from spmd_rl.controller.channel.address import is_ipv6
from spmd_rl.controller.channel.codec import MAX_PAYLOAD_BYTES, NOTHING, Packed
from spmd_rl.controller.channel.envelope import Incoming, Outgoing
from spmd_rl.controller.channel.frames import LAST, LATER, send
from spmd_rl.controller.channel.leader_followers import LeaderFollowers
from spmd_rl.controller.channel.secret import Keys
from spmd_rl.controller.channel.wakeup_fd import WakeupFd
from spmd_rl.controller.channel.wire import (
    Message,
    Refusal,
    Result,
    ToController,
    decode_at_controller,
    encode,
)

TICK_S = 0.25
MOMENT_S = 0.005  # a call that takes longer takes long

Values = Sequence[tuple[tuple[int, ...], Packed]]  # each with the ranks that receive it


class Listener(Protocol):
    """What the sockets report to; its methods run on the thread whose turn it is, one at a time,
    and must not block.
    """

    def on_result(self, call: int, rank: int, value: Packed) -> bool:
        """Take what a call returned on a rank; False counts it as dropped."""

    def on_message(self, rank: int, message: ToController, value: Packed, call: int) -> bool:
        """Take any other message, which answers `call` if it is an answer; False counts it as
        dropped.
        """

    def on_tick(self, now: float) -> None:
        """Called a few times a second."""

    def on_unreachable(self, rank: int) -> None:
        """A message could not be sent: the connection of `rank` is closed."""

    def on_parent_lost(self) -> None:
        """Rank 0, which started the controller, is gone."""

    def on_signal(self, number: Signals) -> None:
        """Somebody wants the controller to end."""


class Router:
    """Owns every ZeroMQ socket of the controller; whoever waits for answers drives them, by
    `until`. For any thread.
    """

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
        self._router.ipv6 = is_ipv6(address)
        self._router.bind(address)
        self._receive = self._router.recv
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._unknown: Counter[str] = Counter()
        identities = [b"rank-%d" % rank for rank in range(world_size)]
        known: dict[bytes, tuple[ToController, bytes]] = {}
        self._incoming = [
            Incoming(generation, decode_at_controller, known, None) for _ in range(world_size)
        ]
        self._senders = dict(zip(identities, enumerate(self._incoming), strict=True))
        self._outgoing = [(identity, Outgoing(generation)) for identity in identities]
        self._client_key = keys.client.public
        self._listener = listener
        self._on_result = listener.on_result
        self._lifeline = lifeline
        self._outbox: deque[tuple[bytes, Values, int]] = deque()
        self._waker = WakeupFd()
        self._next_tick = 0.0
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], object]] = {
            self._router: self._take_ready,
            self._zap: self._admit,
            self._waker.fileno(): self._woken,
            self._lifeline.fileno(): self._parent_lost,
        }
        for source in self._handlers:
            self._poller.register(source, zmq.POLLIN)
        self._turns = LeaderFollowers(self._handle, self._waker, "router")

    def start(self) -> None:
        """Begin to listen; the listener has to be ready."""
        self._turns.start()

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

    def post(
        self, ranks: Sequence[int], message: Message, value: Packed = NOTHING, call: int = 0
    ) -> None:
        """Send a message to each of `ranks`, in order with all others."""
        self.post_each(encode(message), [(tuple(ranks), value)], call)

    def post_each(self, header: bytes, values: Values, call: int = 0) -> None:
        """Send a header with each value: any two of these reach the ranks that they share in the
        same order.
        """
        self._outbox.append((header, values, call))
        self._turns.now_or_next(self._send)

    def until(self, done: Callable[[], object], seconds: float) -> bool:
        """Handle what arrives until `done()`; False when it was not within `seconds`.

        A wait of a moment is for workers alone, which takes less than half of what polling does; it
        goes on while they answer, until it is time to look after all else.
        Blocks: for `seconds` at most; after a moment, while workers answer, for a tick.
        """
        if seconds > MOMENT_S:
            return self._turns.until(done, seconds)
        if self._turns.take(seconds):
            try:
                self._listen(done, time.monotonic() + seconds)
            finally:
                self._turns.leave()
        return bool(done())

    def close(self) -> None:
        """Send what is queued and close.

        Blocks: for the sockets' linger at most.
        """
        self._turns.close()
        self._send()
        self._context.destroy(linger=1000)
        self._waker.close()

    def take(self, receive: Callable[[], bytes]) -> None:
        """Act on the next message, in one's turn; `receive` gives its frames.

        It comes behind its sender's identity. A frame where an identity should be is one too many
        of the message before, and refused; asking the socket after each frame whether more follow
        takes longer than the frame does.
        """
        sender = self._senders.get(receive())
        if sender is None:
            self._unknown[Refusal.STRANGER] += 1
            return
        rank, incoming = sender
        taken = incoming.take(receive())
        if taken is None:
            return
        message, value, call = taken
        if type(message) is Result:
            asked = self._on_result(call, rank, value)
        else:
            asked = self._listener.on_message(rank, message, value, call)
        if not asked:
            incoming.refuse(Refusal.UNASKED)

    def _take_ready(self) -> None:
        with contextlib.suppress(zmq.Again):
            self.take(self._receive)

    def _listen(self, done: Callable[[], object], end: float) -> None:
        """Wait for workers alone, while they answer; a few times a second look after all else, and
        at the time.
        """
        turns, take, receive = self._turns, self.take, self._receive
        while not done():
            if turns.due:
                turns.due = False
                self._handle(0.0)
                if time.monotonic() >= end:
                    return
                continue
            try:
                take(receive)
            except zmq.Again:  # none answered for a moment
                return

    def _handle(self, seconds: float) -> None:
        if self._outbox:
            self._send()
        for source, _ in self._poller.poll(math.ceil(seconds * 1000)):
            self._handlers[source]()
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + TICK_S
            self._listener.on_tick(now)
        if self._outbox:
            self._send()

    def _woken(self) -> None:
        for number in self._waker.drain():
            self._listener.on_signal(number)

    def _send(self) -> None:
        while self._outbox:
            header, values, call = self._outbox.popleft()
            router, outgoing = self._router, self._outgoing
            for ranks, value in values:
                for rank in ranks:
                    identity, numbered = outgoing[rank]
                    try:
                        send(router, identity, LATER)
                        send(router, numbered.frame(header, value, call), LAST)
                    # no such peer any more: what is sent to it is lost, so it is too
                    except zmq.ZMQError:
                        self._listener.on_unreachable(rank)

    def _admit(self) -> None:
        """Answer one ZAP request (ZeroMQ RFC 27): version, id, domain, address, identity,
        mechanism, key.
        """
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and [z85.encode(key) for key in credentials] == [
            self._client_key
        ]
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _parent_lost(self) -> None:
        self._poller.unregister(self._lifeline.fileno())
        self._listener.on_parent_lost()


def _server_socket(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = keys.server.private
    router.zap_domain = b"spmd_rl"
    router.router_mandatory = True
    router.maxmsgsize = MAX_PAYLOAD_BYTES
    router.rcvtimeo = int(MOMENT_S * 1000)
    # what is sent is bounded by what was asked; what is received, by ZeroMQ's default of 1000
    router.sndhwm = 0
    return router
