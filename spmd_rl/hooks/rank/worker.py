"""Worker of a rank: one process of hooks, and the calls that it was sent.

What a hook has started ends with the process, in whatever session it runs (process_family.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from spmd_rl.controller.lifecycle.process_family import MARK_ENV, end_family
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.rank.output import Output
from spmd_rl.hooks.wire.channel import CallNote, MessageReader, encode
from spmd_rl.hooks.wire.messages import CLOSE_S, DAMAGED_EXIT, TO_RANK, Start, ToProcess, ToRank
from spmd_rl.mesh.environment import without_world

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmd_rl.hooks.child.main import main; main(*map(int, sys.argv[2:]))"
)
_RECEIVE_BYTES = 1 << 18


class HookWorker:
    """A process that imports hooks and runs calls. No method but `close` waits for it.

    `selector` is told its socket. The process dies with the thread that started it, because Linux
    sends its parent-death signal then. So a rank starts it from the main thread.
    """

    def __init__(self, start: Start, selector: selectors.BaseSelector) -> None:
        """Start the process. Raises: SpmdError outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise SpmdError("start hooks from the main thread: their processes end with it")
        self.calls: dict[int, bool] = {}  # sent and not answered; false: nobody waits any more
        self.started_s = time.monotonic()
        self.is_ready = False  # it has imported the hooks
        self.is_fresh = True  # it has answered no call yet
        self.is_alone = False  # with a call that may have ended a process
        self.is_retired = False  # it gets no more calls, and ends after those that it has
        self._selector = selector
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._output, self._mark, note = Output(), secrets.token_hex(8), CallNote.create()
        with theirs:
            self._process = _started(theirs.fileno(), note, self._output.writing_end, self._mark)
        os.close(self._output.writing_end)
        self._note = CallNote(note)
        os.close(note)
        self._reader, self._unsent = MessageReader(TO_RANK), bytearray()
        self._closes = bool(start.generate)
        selector.register(self._socket, selectors.EVENT_READ)
        self.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_garbled(self) -> bool:
        """Whether bytes came through the socket that are no message."""
        return self._reader.is_garbled

    @property
    def tail(self) -> str:
        """The end of what the process printed."""
        return self._output.tail

    def send(self, message: ToProcess) -> None:
        """Send a message; what the socket does not take now goes with a later `receive`."""
        self._unsent += encode(message)
        self._flush()

    def receive(self) -> list[ToRank]:
        """Return the messages that have come, send what is unsent, and show what was printed."""
        self._output.read()
        if self._unsent:
            self._flush()
        messages: list[ToRank] = []
        # the other end may be closed while the process still runs
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while not self.is_garbled and (data := self._socket.recv(_RECEIVE_BYTES)):
                messages += self._reader.feed(data)
                if len(data) < _RECEIVE_BYTES:
                    break
        return messages

    def running(self) -> tuple[int, float]:
        """Return the call that runs now, or `NO_CALL`, and since when on the monotonic clock."""
        return self._note.read()

    def ending(self) -> str:
        """Return how the process has ended, as the end of a sentence; "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        if code == DAMAGED_EXIT:
            return "closed file descriptors of its process"
        if code >= 0:
            return f"ended its process with exit code {code}"
        self._output.read()  # its last words
        return f"ended its process with {signal.Signals(-code).name}{_place(self.tail)}"

    def close(self) -> None:
        """End the process, and kill what it has started. Blocks: until the system has ended it.

        A program of episodes gets a few seconds to close.
        """
        if self._closes and self.is_ready:
            self._socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
        if sys.platform == "linux":
            end_family(self._process.pid, self._mark)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.unregister(self._socket)
        self._socket.close()
        self._output.close()

    def _flush(self) -> None:
        """Send what was not sent yet, as far as the socket takes it."""
        waited = self._selector.get_key(self._socket).events & selectors.EVENT_WRITE
        # a process that has ended is noticed by `ending`
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        if waited or self._unsent:
            writes = selectors.EVENT_WRITE if self._unsent else 0
            self._selector.modify(self._socket, selectors.EVENT_READ | writes)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of hooks: the rank's own without the variables of its world."""
    kept = without_world(environment)
    if threads := environment.get("OMP_NUM_THREADS"):
        kept["OMP_NUM_THREADS"] = threads
    return kept


def _started(socket_fd: int, note_fd: int, output_fd: int, mark: str) -> subprocess.Popen[bytes]:
    descriptors = [str(socket_fd), str(note_fd), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, json.dumps(sys.path), *descriptors],
        env=child_environment(os.environ) | {MARK_ENV: mark},
        pass_fds=[socket_fd, note_fd],
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        start_new_session=True,
    )


def _place(tail: str) -> str:
    """Return where in Python a process crashed, from what faulthandler printed."""
    lines = [line.strip() for line in tail.split("\n")]
    places = [line for line in lines if line.startswith('File "') and "spmd_rl" not in line]
    return f" (at {places[0]})" if places else ""
