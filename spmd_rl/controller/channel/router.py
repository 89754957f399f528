"""Router: the controller's sockets. It admits by CURVE the one client key of this run."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from signal import Signals
from typing import Protocol

import zmq

from spmd_rl.controller.channel.address import is_ipv6
from spmd_rl.controller.channel.codec import MAX_PAYLOAD_BYTES, NOTHING, Packed
from spmd_rl.controller.channel.envelope import EnvelopeReader, EnvelopeWriter
from spmd_rl.controller.channel.frames import LAST, LATER, send
from spmd_rl.controller.channel.leader_followers import EventLoop, LoopListener
from spmd_rl.controller.channel.messages import (
    ChannelMessage,
    CommandResult,
    Refusal,
    ToController,
    decode_at_controller,
    encode,
)
from spmd_rl.controller.channel.secret import Keys
from spmd_rl.controller.channel.zap import Authenticator

SHORT_WAIT_S = 0.005  # a wait up to this long receives from workers alone

Values = Sequence[tuple[tuple[int, ...], Packed]]  # values, each with the ranks that receive it
Post = tuple[bytes, Values, int]  # a header, its values, and the number of its call


class ControllerListener(LoopListener, Protocol):
    """Receives the events of a Router."""

    def on_result(self, call: int, rank: int, value: Packed) -> bool:
        """Accept what a call returned on a rank; False counts the frame as refused."""

    def on_message(self, rank: int, message: ToController, value: Packed, call: int) -> bool:
        """Accept any other message; False counts the frame as refused.

        `call` is the number of the call that it answers, if it is an answer.
        """

    def on_unreachable(self, rank: int) -> None:
        """Act on the end of the connection to a rank, noticed when sending to it."""

    def on_parent_lost(self) -> None:
        """Act on the end of rank 0, which started the controller."""


class Router:
    """Owns every ZeroMQ socket of the controller. Any thread may use it.

    The thread that waits for answers handles what arrives, in `handle_until`.
    """

    def __init__(
        self,
        address: str,
        keys: Keys,
        generation: int,
        world_size: int,
        listener: ControllerListener,
        lifeline: socket.socket,
    ) -> None:
        self._context = zmq.Context()
        authenticator = Authenticator(self._context, keys.client.public)
        self._router = _server_socket(self._context, keys)
        self._router.ipv6 = is_ipv6(address)
        self._router.bind(address)
        self._receive = self._router.recv
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._refused_strangers: Counter[str] = Counter()
        identities = [b"rank-%d" % rank for rank in range(world_size)]
        cache: dict[bytes, tuple[ToController, bytes]] = {}
        self._readers = [
            EnvelopeReader(generation, decode_at_controller, cache, None) for _ in range(world_size)
        ]
        self._senders = dict(zip(identities, enumerate(self._readers), strict=True))
        self._writers = [(identity, EnvelopeWriter(generation)) for identity in identities]
        self._listener = listener
        self._lifeline = lifeline
        self._outbox: deque[Post] = deque()
        handlers = {
            self._router: self._handle_ready,
            authenticator.socket: authenticator.answer,
            self._lifeline.fileno(): self._on_lifeline_closed,
        }
        self._loop = EventLoop(handlers, listener, self._send, "router")

    def start(self) -> None:
        """Start to handle messages; the listener has to be ready."""
        self._on_result = self._listener.on_result
        self._loop.start()

    @property
    def refused(self) -> Counter[str]:
        """The number of frames that were dropped, by reason."""
        counts = Counter(self._refused_strangers)
        return sum((reader.refused for reader in self._readers), counts)

    def refused_of(self, rank: int) -> Counter[str]:
        """Return the number of frames of one rank that were dropped, by reason."""
        return self._readers[rank].refused

    def catch_signals(self, *numbers: Signals) -> None:
        """Pass these signals to the listener. Call it on the main thread only."""
        self._loop.wakeup.catch_signals(*numbers)

    def post(self, ranks: Sequence[int], message: ChannelMessage) -> None:
        """Send a message to each of `ranks`, in order with all others."""
        self.post_each(encode(message), [(tuple(ranks), NOTHING)])

    def post_each(
        self, header: bytes, values: Values, call: int = 0, also: Sequence[Post] = ()
    ) -> None:
        """Send a header with each of `values` to its ranks, and what is to go `also`.

        Two calls of this method reach all ranks that they share in the same order.
        """
        self._outbox.extend([(header, values, call), *also])
        self._loop.run_or_wake(self._send)

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        """Handle what arrives until `done()`; False when that was not within `seconds`.

        A short wait receives from workers alone, at less than half the cost of polling. It goes on
        while they answer, until the other sources are due.
        Blocks: for `seconds` at most; a short wait, while workers answer, for a tick.
        """
        if seconds > SHORT_WAIT_S or not self._loop.lead(0.0):
            return self._loop.handle_until(done, seconds)
        try:
            self._receive_until(done, time.monotonic() + seconds)
        finally:
            self._loop.resign()
        return bool(done())

    def wake(self) -> None:
        """Have the threads that wait look whether they need to wait any longer."""
        self._loop.wake_leader()

    def close(self) -> None:
        """Send what is queued and close.

        Blocks: for the sockets' linger at most.
        """
        self._loop.close()
        self._send()
        self._context.destroy(linger=1000)
        self._loop.wakeup.close()

    def handle_message(self, receive: Callable[[], bytes]) -> None:
        """Handle the next message, whose frames `receive` returns. Only the leader calls it.

        A message is its sender's identity and one frame. A frame in an identity's place is one too
        many of the message before, and is refused. Asking the socket after each frame whether more
        follow would cost more than the frame does.
        """
        sender = self._senders.get(receive())
        if sender is None:
            self._refused_strangers[Refusal.STRANGER] += 1
            return
        rank, reader = sender
        opened = reader.read(receive())
        if opened is None:
            return
        message, value, call = opened
        if type(message) is CommandResult:
            accepted = self._on_result(call, rank, value)
        else:
            accepted = self._listener.on_message(rank, message, value, call)
        if not accepted:
            reader.refuse(Refusal.UNASKED)

    def _handle_ready(self) -> None:
        with contextlib.suppress(zmq.Again):
            self.handle_message(self._receive)

    def _receive_until(self, done: Callable[[], object], end: float) -> None:
        """Receive from workers while they answer; look after all other sources when that is due."""
        loop, handle_message, receive = self._loop, self.handle_message, self._receive
        while not done():
            if loop.handle_due:
                loop.handle_due = False
                loop.handle(0.0)
                if time.monotonic() >= end:
                    return
                continue
            try:
                handle_message(receive)
            except zmq.Again:  # no worker answered within SHORT_WAIT_S
                return
            loop.wake_followers()

    def _send(self) -> None:
        while self._outbox:
            header, values, call = self._outbox.popleft()
            router, writers = self._router, self._writers
            for ranks, value in values:
                for rank in ranks:
                    identity, writer = writers[rank]
                    try:
                        send(router, identity, LATER)
                        send(router, writer.frame(header, value, call), LAST)
                    # The peer has closed its connection. What is sent to it is lost.
                    except zmq.ZMQError:
                        self._listener.on_unreachable(rank)

    def _on_lifeline_closed(self) -> None:
        self._loop.remove(self._lifeline.fileno())
        self._listener.on_parent_lost()


def _server_socket(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = keys.server.private
    router.zap_domain = b"spmd_rl"
    router.router_mandatory = True
    router.maxmsgsize = MAX_PAYLOAD_BYTES
    router.rcvtimeo = int(SHORT_WAIT_S * 1000)
    # The answers are bounded by what was asked. What is received is bounded by ZeroMQ's default of
    # 1000 messages.
    router.sndhwm = 0
    return router
