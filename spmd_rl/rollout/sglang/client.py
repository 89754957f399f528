"""Client of SGLang's scheduler: three ZeroMQ sockets in a folder that no other user can enter.

Requests go out on one socket and tokens come in on another, as to and from SGLang's own tokenizer
process. Calls of the scheduler's methods have the third.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from spmd_rl.errors import DeadlineError, LostRankError, SpmdError
from spmd_rl.rollout.sglang.child_calls import PREFIX
from spmd_rl.rollout.sglang.structs import (
    RpcReqInput,
    SchedulerMessage,
    decode,
    decode_rpc,
    encode,
)

SEND_DEADLINE_S = 60.0
OTHERS_S = 5  # how long the end of another rank's child may take after that of our own

M = TypeVar("M", bound=msgspec.Struct)

# what SGLang calls the addresses that this client binds or leaves unused
ADDRESSES = {
    "tokenizer_ipc_name": "answers",
    "scheduler_input_ipc_name": "requests",
    "rpc_ipc_name": "calls",
    "detokenizer_ipc_name": "unused-text",
    "metrics_ipc_name": "unused-metrics",
}


class SchedulerClient:
    """One scheduler's sockets. `child_fd` can be read when the child has ended.

    `on_child_ended` is called then, and raises. `on_call_failed` is called when a method of ours
    has failed, which the child says on its own socket too.
    """

    def __init__(
        self,
        folder: Path,
        child_fd: int,
        on_child_ended: Callable[[], None],
        on_call_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = zmq.Context()
        self._requests = self._bound(self._context.socket(zmq.PUSH), folder / "requests")
        self._answers = self._bound(self._context.socket(zmq.PULL), folder / "answers")
        self._calls = self._bound(self._context.socket(zmq.DEALER), folder / "calls")
        self._child_fd = child_fd
        self._others: dict[int, str] = {}  # names of other ranks' children, by descriptor
        self._on_child_ended = on_child_ended
        self._on_call_failed = on_call_failed
        self._inbox: deque[SchedulerMessage] = deque()
        self._num_calls = 0  # that were begun and not answered

    @staticmethod
    def addresses(folder: Path) -> dict[str, str]:
        """Return the addresses of all sockets, by SGLang's names for them."""
        return {key: f"ipc://{folder / name}" for key, name in ADDRESSES.items()}

    def watch(self, fd: int, name: str) -> None:
        """Do not wait any longer once `fd` can be read: the child `name` of another rank has ended.

        The descriptor is closed with the client.
        """
        self._others[fd] = name

    def close(self) -> None:
        self._context.destroy(linger=0)
        while self._others:
            os.close(self._others.popitem()[0])

    def send(self, message: msgspec.Struct) -> None:
        """Send a request. Raises: LostRankError when the child has ended."""
        self._send(self._requests, encode(message))

    def receive(self, wait_s: float) -> SchedulerMessage | None:
        """Return the next message of the scheduler; None if none comes.

        Blocks: for at most `wait_s`.
        Raises: LostRankError when the child ends meanwhile.
        """
        if self._inbox:
            return self._inbox.popleft()
        return self._received(wait_s)

    def request(self, message: msgspec.Struct, answer: type[M], deadline_s: float) -> M:
        """Send a request and return its answer. What else comes meanwhile is kept for `receive`.

        Blocks: until the scheduler answers.
        Raises: DeadlineError after `deadline_s`; LostRankError when the child ends.
        """
        self.send(message)
        end = time.monotonic() + deadline_s
        while (left := end - time.monotonic()) > 0:
            received = self._received(left)
            if isinstance(received, answer):
                return received
            if received is not None:
                self._inbox.append(received)
        raise DeadlineError(_unanswered(type(message).__name__, deadline_s))

    def start_call(self, method: str, **parameters: bool | int | float | str | None) -> None:
        """Begin a call of a method of the scheduler, which `finish_call` waits for."""
        self._num_calls += 1
        self._send(self._calls, encode(RpcReqInput(method=method, parameters=parameters or None)))

    def finish_call(self, method: str, deadline_s: float) -> None:
        """Wait until the call has returned, and those that were begun before it and given up.

        Blocks: until then.
        Raises: SpmdError with what the method raised; DeadlineError; LostRankError.
        """
        end = time.monotonic() + deadline_s
        while (left := end - time.monotonic()) > 0:
            if self._wait(self._calls, left):
                answer = decode_rpc(self._calls.recv())
                self._num_calls -= 1
                if self._num_calls:
                    continue
                if not answer.success:
                    if method.startswith(PREFIX):
                        self._on_call_failed()
                    raise SpmdError(f"SGLang's scheduler failed in {method}: {answer.message}")
                return
        raise DeadlineError(_unanswered(method, deadline_s))

    def _send(self, sock: zmq.Socket[bytes], data: bytes) -> None:
        """Send to the scheduler. A socket without a peer would block for ever.

        Blocks: until the scheduler has connected, or has ended; SEND_DEADLINE_S ends it.
        """
        if not self._wait(sock, SEND_DEADLINE_S, zmq.POLLOUT):
            raise DeadlineError(f"SGLang's scheduler has not connected in {SEND_DEADLINE_S:g} s")
        try:
            sock.send(data, zmq.NOBLOCK)
        except zmq.Again:  # it has ended just now
            self._on_child_ended()

    def _received(self, wait_s: float) -> SchedulerMessage | None:
        return decode(self._answers.recv()) if self._wait(self._answers, wait_s) else None

    def _wait(self, sock: zmq.Socket[bytes], wait_s: float, event: int = zmq.POLLIN) -> bool:
        """Return whether a message is at `sock`, or may be sent, within `wait_s`.

        Messages go before the end of the child, so that none of them is lost.
        Raises: LostRankError when another rank's child has ended.
        """
        poller = zmq.Poller()
        poller.register(sock, event)
        for fd in (self._child_fd, *self._others):
            poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(wait_s * 1000))))
        if sock in ready:
            return True
        if self._child_fd in ready:
            self._raise_ended()
        for fd in ready:
            raise LostRankError(ended(self._others[fd]))
        return False

    def _raise_ended(self) -> None:
        """Raise the error of our own child, which names others that end with it.

        One of them may be the cause: the end of a process on a GPU is known some time later.
        """
        try:
            self._on_child_ended()
        except SpmdError as error:
            poller = zmq.Poller()
            for fd in self._others:
                poller.register(fd, zmq.POLLIN)
            also = poller.poll(OTHERS_S * 1000) if self._others else []
            named = " and ".join(self._others[fd] for fd, _ in also)
            if not named:
                raise
            raise LostRankError(f"{error}; {named} ended too") from error

    def _bound(self, sock: zmq.Socket[bytes], path: Path) -> zmq.Socket[bytes]:
        sock.set_hwm(0)
        sock.bind(f"ipc://{path}")
        return sock


def ended(name: str) -> str:
    """Return the sentence of a child of another rank that has ended; that rank knows how."""
    return f"{name} ended; its output says why"


def _unanswered(what: str, deadline_s: float) -> str:
    return (
        f"SGLang's scheduler did not answer {what} within engine.answer_deadline_s = {deadline_s:g}"
    )
