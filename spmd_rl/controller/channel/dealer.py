"""Dealer: a worker's socket, which brings commands to its main thread and takes its answers."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from signal import Signals
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from spmd_rl.controller.channel.address import is_ipv6
from spmd_rl.controller.channel.codec import MAX_PAYLOAD_BYTES, NOTHING, Packed
from spmd_rl.controller.channel.envelope import EnvelopeReader, EnvelopeWriter
from spmd_rl.controller.channel.frames import LAST, send
from spmd_rl.controller.channel.leader_followers import TICK_S, EventLoop, LoopListener
from spmd_rl.controller.channel.messages import (
    Call,
    ChannelMessage,
    Command,
    Stop,
    ToWorker,
    decode_at_worker,
    encode,
)
from spmd_rl.controller.channel.secret import Keys

NOBLOCK = int(zmq.DONTWAIT)
EXIT_LINGER_MS = 200  # for the last messages of a process that ends
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

# a message for the main thread, its value, and the number of its call
ReceivedCommand = tuple[Command | Stop, Packed, int]
# an encoded header, its value, and the number of the call that it answers (0 for none)
Answer = tuple[bytes, Packed, int]


class WorkerListener(LoopListener, Protocol):
    """Receives the events of a Dealer."""

    def on_message(self, message: ToWorker) -> None:
        """Act on a message that is not for the main thread."""

    def on_disconnected(self) -> None:
        """Act on the end of the connection to the controller."""

    def on_handshake_failed(self) -> None:
        """Act on a controller that holds another secret than this worker."""


class Dealer:
    """Owns the DEALER socket of a worker. Any thread may call `post`.

    The main thread calls `next`, and handles whatever arrives while it waits for a command. While
    it runs one, a background thread handles messages, and queues further commands.
    """

    def __init__(
        self, endpoint: str, keys: Keys, generation: int, rank: int, listener: WorkerListener
    ) -> None:
        self._listener = listener
        self._inbox: deque[ReceivedCommand] = deque()  # commands that the main thread did not read
        self._outbox: deque[Answer] = deque()
        self._reader = EnvelopeReader(generation, decode_at_worker)
        self._writer = EnvelopeWriter(generation, secrets.randbits(62))
        self._context = zmq.Context()
        self._socket = _client_socket(self._context, keys, rank)
        self._socket.ipv6 = is_ipv6(endpoint)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:  # `endpoint` is malformed
            self._monitor.close()
            self._context.destroy(linger=0)
            raise
        self._receive = self._socket.recv
        handlers: dict[object, Callable[[], object]] = {
            self._socket: self._queue_next,
            self._monitor: self._on_connection_event,
        }
        self._loop = EventLoop(handlers, listener, self._send, "dealer")

    def start(self) -> None:
        """Start to handle messages in the background; the listener has to be ready."""
        self._loop.start()

    @property
    def refused(self) -> dict[str, int]:
        """The number of frames that were dropped, by reason."""
        return dict(self._reader.refused)

    def catch_signals(self, *numbers: Signals) -> None:
        """Pass these signals to the listener. Call it on the main thread only."""
        self._loop.wakeup.catch_signals(*numbers)

    def post(self, message: ChannelMessage, value: Packed = NOTHING) -> None:
        """Send a message to the controller, in order with all others."""
        self._outbox.append((encode(message), value, 0))
        self._loop.run_or_wake(self._send)

    def next(
        self,
        answers: Sequence[Answer] = (),
        *,
        wait: bool = True,
        watched: Sequence[int] = (),
        seconds: float = TICK_S,
    ) -> list[ReceivedCommand]:
        """Send the answers, and return the next command; without `wait`, all that are here.

        With `watched` descriptors it returns nothing once one of them is readable, and after
        `seconds`; without them too, if that is less than a tick. Else it sleeps in `recv`, which
        costs half of a poll. Other sources are polled when `handle_due` says so.
        Blocks: on the controller; the listener ends this process if the controller is lost.
        """
        loop = self._loop
        self._outbox.extend(answers)
        while True:
            if not loop.lead(TICK_S):
                continue
            try:
                self._send()
                if loop.handle_due:
                    loop.handle_due = False
                    loop.handle(0.0)
                if not wait:
                    return self._all_here()
                if self._inbox:
                    return [self._inbox.popleft()]
                if watched or seconds < TICK_S:
                    loop.handle(seconds, watched)
                    return [self._inbox.popleft()] if self._inbox else []
                try:
                    frame = self._receive()
                except zmq.Again:  # nothing arrived within a tick
                    continue
                if command := self.handle_frame(frame):
                    return [command]
            finally:
                loop.resign()

    def _all_here(self) -> list[ReceivedCommand]:
        """Return the commands that have arrived. Only the leader calls it."""
        commands = list(self._inbox)
        self._inbox.clear()
        while True:
            try:
                frame = self._receive(NOBLOCK)
            except zmq.Again:
                return commands
            if command := self.handle_frame(frame):
                commands.append(command)

    def close(self) -> list[Signals]:
        """Send what is queued and close; return the signals that nobody was told of.

        Blocks: for the socket's linger at most.
        """
        self._loop.close()
        self._send()
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=1000)
        return self._loop.wakeup.close()

    def close_for_exit(self) -> None:
        """Send what is queued and close, from a method of the listener; the process ends next.

        Blocks: for `EXIT_LINGER_MS` at most.
        """
        self._send()
        self._context.destroy(linger=EXIT_LINGER_MS)

    def handle_frame(self, frame: bytes) -> ReceivedCommand | None:
        """Return a command for the main thread, or pass any other message to the listener.

        Only the leader calls it.
        """
        opened = self._reader.read(frame)
        if opened is None:
            return None
        message, value, call = opened
        # most messages are calls, and comparing types is faster than isinstance
        if type(message) is Call or isinstance(message, Command):
            return message, value, call
        if isinstance(message, Stop) and not message.exit_code:
            return message, value, call
        self._listener.on_message(message)
        return None

    def _queue_next(self) -> None:
        if command := self.handle_frame(self._receive()):
            self._inbox.append(command)

    def _on_connection_event(self) -> None:
        if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
            self._listener.on_disconnected()
        else:
            self._listener.on_handshake_failed()

    def _send(self) -> None:
        while self._outbox:
            header, value, call = self._outbox.popleft()
            send(self._socket, self._writer.frame(header, value, call), LAST)


def _client_socket(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, rank: int
) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.identity = b"rank-%d" % rank
    dealer.curve_serverkey = keys.server.public
    dealer.curve_publickey = keys.client.public
    dealer.curve_secretkey = keys.client.private
    dealer.maxmsgsize = MAX_PAYLOAD_BYTES
    dealer.rcvtimeo = int(TICK_S * 1000)
    # The controller asked for what is sent, which bounds it. What is received is bounded by
    # ZeroMQ's default of 1000 messages.
    dealer.sndhwm = 0
    return dealer
