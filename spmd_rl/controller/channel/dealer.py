"""A worker's socket: it brings commands, answers the controller while the main thread works, and
ends the process.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from spmd_rl.controller.channel.address import is_ipv6
from spmd_rl.controller.channel.codec import MAX_PAYLOAD_BYTES, NOTHING, Packed
from spmd_rl.controller.channel.envelope import Incoming, Outgoing
from spmd_rl.controller.channel.frames import LAST, send
from spmd_rl.controller.channel.leader_followers import LeaderFollowers
from spmd_rl.controller.channel.secret import FILE_ENV, SECRET_ENV, Keys
from spmd_rl.controller.channel.wakeup_fd import WakeupFd
from spmd_rl.controller.channel.wire import (
    Bye,
    Call,
    Command,
    Dying,
    Hello,
    Message,
    Ping,
    Pong,
    Signalled,
    StackRequest,
    Stacks,
    Stop,
    ToWorker,
    decode_at_worker,
    encode,
)
from spmd_rl.controller.lifecycle.exit_message import end_process
from spmd_rl.controller.lifecycle.process_tree import end_children
from spmd_rl.controller.lifecycle.shutdown import Farewell
from spmd_rl.controller.lifecycle.stacks import all_stacks, flight_record, place_of_main_thread
from spmd_rl.controller.lifecycle.watchdog import Watchdog
from spmd_rl.errors import LostRankError

TICK_S = 0.25
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

# for the main thread: a message, its value and the number of its call
Order = tuple[Command | Stop, Packed, int]
# a header, its value and the number of the call that it answers, if any
Reply = tuple[bytes, Packed, int]


class Dealer:
    """Owns the worker's DEALER socket. `post` may be called from any thread.

    The thread that waits for commands handles whatever arrives; while it runs one, a thread of this
    object stands in (turns.py), which keeps further commands for it. `abandon` is called when the
    controller has been given up, before the process ends; `on_tick` a few times a second.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Keys,
        generation: int,
        hello: Hello,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_tick: Callable[[], None] = lambda: None
        self.farewell = Farewell()
        self.checkpoints = ""  # the folder of the run's, once the controller has told it
        self._inbox: deque[Order] = deque()  # what the stand-in took
        self._outbox: deque[Reply] = deque()
        self._hello = hello
        self._endpoint = endpoint
        self._abandon = abandon
        self._incoming = Incoming(generation, decode_at_worker)
        self._outgoing = Outgoing(generation, secrets.randbits(62))
        self._context = zmq.Context()
        self._socket = _client_socket(self._context, keys, hello.rank)
        self._socket.ipv6 = is_ipv6(endpoint)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:  # it is no endpoint
            self._monitor.close()
            self._context.destroy(linger=0)
            raise
        self._receive = self._socket.recv
        self._waker = WakeupFd()
        self._waker.take_signals(signal.SIGTERM, signal.SIGINT)
        self._launcher = os.getppid()
        self._vigil = Watchdog(endpoint, self._launcher, time.monotonic())
        self._next_watch = 0.0
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {
            self._socket: self._keep_next,
            self._monitor: self._disconnected,
            self._waker.fileno(): self._woken,
        }
        for source in self._handlers:
            self._poller.register(source, zmq.POLLIN)
        self._turns = LeaderFollowers(self._handle, self._waker, "dealer")
        self.post(hello)
        self._turns.start()

    @property
    def refused(self) -> dict[str, int]:
        """How many frames were dropped, by reason."""
        return dict(self._incoming.refused)

    def post(self, message: Message, value: Packed = NOTHING) -> None:
        """Send a message to the controller, in order with all others."""
        self._outbox.append((encode(message), value, 0))
        self._turns.now_or_next(self._send)

    def next(self, reply: Reply | None = None) -> Order:
        """The next command, once the reply to the last is sent.

        It sleeps on the controller alone, which takes half of what polling does; all else is seen
        to in time.
        Blocks: on the controller; this process ends if it is lost.
        """
        turns = self._turns
        while True:
            if not turns.take(TICK_S):
                continue
            try:
                if reply is not None:
                    header, value, call = reply
                    send(self._socket, self._outgoing.frame(header, value, call), LAST)
                    reply = None
                if turns.due:
                    turns.due = False
                    self._handle(0.0)
                if self._inbox:
                    return self._inbox.popleft()
                try:
                    frame = self._receive()
                except zmq.Again:  # nothing came within a tick
                    continue
                if order := self.take(frame):
                    return order
            finally:
                turns.leave()

    def close(self) -> signal.Signals | None:
        """Send what is queued and close; returns the signal that came too late for the controller,
        if one did.

        Blocks: for the socket's linger at most.
        """
        self._turns.close()
        self._send()
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=1000)
        late = self._waker.close()
        return self._vigil.signal or next(iter(late), None)

    def take(self, frame: bytes) -> Order | None:
        """What the socket received, in one's turn: an order for the main thread, or done at once."""
        taken = self._incoming.take(frame)
        if taken is None:
            return None
        message, value, call = taken
        # most are calls, and the first is quickly asked
        if type(message) is Call or isinstance(message, Command):
            return message, value, call
        if isinstance(message, Stop) and not message.exit_code:
            return message, value, call
        self._act(message)
        return None

    def _keep_next(self) -> None:
        if order := self.take(self._receive()):
            self._inbox.append(order)

    def _handle(self, seconds: float) -> None:
        if self._outbox:
            self._send()
        for source, _ in self._poller.poll(math.ceil(seconds * 1000)):
            self._handlers[source]()
        if (now := time.monotonic()) >= self._next_watch:
            self._next_watch = now + TICK_S
            self._watch(now)
            self.on_tick()
        if self._outbox:
            self._send()

    def _woken(self) -> None:
        for number in self._waker.drain():
            if self._vigil.signalled(number, time.monotonic()):
                self.post(Signalled(number.name))

    def _disconnected(self) -> None:
        if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
            self._vigil.disconnected(time.monotonic())
            return
        self._end(
            f"rank {self._hello.rank} and the controller at {self._endpoint} hold different secrets: "
            f"give every rank the same {SECRET_ENV} or {FILE_ENV}, or none",
            2,
        )

    def _watch(self, now: float) -> None:
        """End this process when those above it are gone."""
        if why := self._vigil.launcher_lost(os.getppid()):
            self._die(why)
        if why := self._vigil.given_up(now):
            self._abandon()
            self._die(why)

    def _send(self) -> None:
        while self._outbox:
            header, value, call = self._outbox.popleft()
            send(self._socket, self._outgoing.frame(header, value, call), LAST)

    def _act(self, message: ToWorker) -> None:
        match message:
            case Ping(lost_after_s, checkpoints):
                self.checkpoints = checkpoints
                self._vigil.pinged(lost_after_s, time.monotonic())
                self.post(Pong())
            case StackRequest():
                self._post_stacks()
            case Stop(sentence, exit_code, lost):
                self._post_stacks()
                self.post(Bye())
                # as it was: a process whose launcher is gone ends by itself
                end_children(self._launcher, lost)
                self._end(sentence, exit_code)

    def _post_stacks(self) -> None:
        self.post(
            Stacks(place_of_main_thread(), all_stacks(), self.refused), (b"", flight_record())
        )

    def _die(self, why: str) -> None:
        counts = "".join(
            f"; {count} frames refused: {reason}" for reason, count in self.refused.items()
        )
        self.post(Dying(why + counts))
        who = f"rank {self._hello.rank} (host {self._hello.host}, pid {self._hello.pid})"
        self._end(self.farewell.take(LostRankError(f"{who} {why}{counts}")), 1)

    def _end(self, sentence: str, exit_code: int) -> None:
        """End the process from here: the main thread may be inside a collective that nobody will
        finish.
        """
        self._send()
        self._context.destroy(linger=200)
        end_process(sentence, exit_code)


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
    # what is sent is bounded by what was asked; what is received, by ZeroMQ's default of 1000
    dealer.sndhwm = 0
    return dealer
