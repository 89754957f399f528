"""A worker's communication thread: it answers the controller while the main thread works, and ends the process."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque

import zmq
from zmq.utils.monitor import recv_monitor_message

from spmd_rl.controller.last_words import end_process
from spmd_rl.controller.secret import FILE_ENV, SECRET_ENV, Keys
from spmd_rl.controller.waker import Waker
from spmd_rl.controller.wire import (
    MAX_PAYLOAD_BYTES,
    Bye,
    Command,
    Hello,
    Message,
    Ping,
    Pong,
    StackRequest,
    Stacks,
    Stop,
    ToWorker,
    WireError,
    decode_at_worker,
    encode,
)

TICK_MS = 250
CONNECT_S = 30.0  # until the first word of the controller
CLOSED_S = 1.5  # for rank 0 to say why the controller is gone, once its connection closed
SIGNALLED_S = 5.0  # for the controller to find the cause, once the launcher ends this process
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Dealer:
    """Owns the worker's DEALER socket. Commands arrive in `inbox`; `post` may be called from any thread."""

    def __init__(self, endpoint: str, keys: Keys, generation: int, hello: Hello) -> None:
        self.inbox: queue.SimpleQueue[tuple[Command | Stop, bytes]] = queue.SimpleQueue()
        self.dropped: Counter[str] = Counter()
        self._generation = generation
        self._rank = hello.rank
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = _client_socket(self._context, keys, hello.rank)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._outbox: deque[list[bytes]] = deque()
        self._waker = Waker()
        self._waker.take_signals(signal.SIGTERM, signal.SIGINT)
        self._give_up_at, self._why = time.monotonic() + CONNECT_S, f"heard nothing from the controller at {endpoint}"
        self._signal: signal.Signals | None = None
        self._closing = False
        self.post(hello)
        self._thread = threading.Thread(target=self._run, name="dealer", daemon=True)
        self._thread.start()

    def post(self, message: Message, payload: bytes = b"") -> None:
        """Queue a message to the controller."""
        self._outbox.append(encode(self._generation, message, payload))
        self._waker.wake()

    def close(self) -> None:
        """Send what is queued and end the thread.

        Blocks: for the socket's linger at most.
        """
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._waker.fileno()):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(TICK_MS))
            if self._waker.fileno() in ready:
                self._woken()
            if self._monitor in ready:
                self._disconnected()
            if self._socket in ready:
                self._receive()
            self._send()
            if time.monotonic() > self._give_up_at:
                self._end(f"rank {self._rank} {self._why}", 1)
        self._send()
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=1000)

    def _woken(self) -> None:
        for number in self._waker.drain():
            if self._signal is None:
                self._signal = number
                self._give_up_at, self._why = time.monotonic() + SIGNALLED_S, f"was ended by {self._signal.name}"
                self.post(Bye(self._signal.name))

    def _disconnected(self) -> None:
        if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
            self._give_up_at, self._why = time.monotonic() + CLOSED_S, "lost the controller: its connection closed"
            return
        self._end(
            f"rank {self._rank} and the controller at {self._endpoint} hold different secrets: "
            f"give every rank the same {SECRET_ENV} or {FILE_ENV}, or none",
            2,
        )

    def _send(self) -> None:
        while self._outbox:
            self._socket.send_multipart(self._outbox.popleft())

    def _receive(self) -> None:
        frames = self._socket.recv_multipart()
        try:
            message, payload = decode_at_worker(self._generation, frames)
        except WireError as error:
            self.dropped[str(error)] += 1
            return
        self._take(message, payload)

    def _take(self, message: ToWorker, payload: bytes) -> None:
        match message:
            case Ping(lost_after_s):
                self.post(Pong())
                if self._signal is None:
                    self._give_up_at = time.monotonic() + lost_after_s
                    self._why = f"lost the controller: silent for {lost_after_s:g} s"
            case StackRequest():
                self.post(Stacks(all_stacks()))
            case Stop(sentence, exit_code) if exit_code:
                self._end(sentence, exit_code)
            case _:
                self.inbox.put((message, payload))

    def _end(self, sentence: str, exit_code: int) -> None:
        """End the process from here: the main thread may be inside a collective that nobody will finish."""
        self.post(Bye(sentence))
        self._send()
        self._context.destroy(linger=200)
        end_process(sentence, exit_code)


def all_stacks() -> str:
    """The Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _client_socket(context: zmq.Context[zmq.Socket[bytes]], keys: Keys, rank: int) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.identity = b"rank-%d" % rank
    dealer.curve_serverkey = keys.server.public
    dealer.curve_publickey = keys.client.public
    dealer.curve_secretkey = keys.client.private
    dealer.maxmsgsize = MAX_PAYLOAD_BYTES
    dealer.sndhwm = dealer.rcvhwm = 0
    return dealer
