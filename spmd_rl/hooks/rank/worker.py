"""Worker of a rank: one process of hooks, the calls that it was sent, and what it prints.

What a hook has started ends with the process, in whatever session it runs (process_family.py).
"""

from __future__ import annotations

import contextlib
import fcntl
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
from collections.abc import Callable, Mapping

from spmd_rl.controller.lifecycle.process_family import MARK_ENV, end_family
from spmd_rl.errors import SpmdError, printable
from spmd_rl.hooks.wire.channel import CallNote, MessageReader, encode
from spmd_rl.hooks.wire.messages import CLOSE_S, DAMAGED_EXIT, TO_RANK, Start, ToProcess, ToRank
from spmd_rl.mesh.environment import without_world

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmd_rl.hooks.child.main import main; main(*map(int, sys.argv[2:]))"
)
_RECEIVE_BYTES = 1 << 18
PIPE_BYTES = 1 << 20  # what a process may print while its rank is busy
READ_BYTES = 1 << 16  # at once
SHOWN_BYTES_PER_S = 1 << 16
TAIL_BYTES = 4096  # kept for the sentence about a process that died


class Output:
    """The reading end of the pipe. `write` shows what was read; `clock` is in seconds."""

    def __init__(
        self,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._descriptor, self.writing_end = os.pipe()
        os.set_blocking(self._descriptor, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            # the system may allow a user no more pages of pipes
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._write, self._clock = write or _show, clock
        self._second_began_s, self._num_shown, self._num_hidden = clock(), 0, 0
        self._tail = b""

    @property
    def tail(self) -> str:
        """The end of what was printed."""
        return self._tail.decode(errors="replace")

    def read(self) -> None:
        """Read `READ_BYTES` at most, and show what the bound of this second allows."""
        if self._clock() - self._second_began_s >= 1:
            if self._num_hidden:
                hidden = f"({self._num_hidden:,} more bytes of a hook's output are left out)"
                self._write(f"\n{hidden}\n")
            self._second_began_s, self._num_shown, self._num_hidden = self._clock(), 0, 0
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        shown = data[: SHOWN_BYTES_PER_S - self._num_shown]
        self._num_shown += len(shown)
        self._num_hidden += len(data) - len(shown)
        if shown:
            self._write(shown.decode(errors="replace"))

    def close(self) -> None:
        os.close(self._descriptor)


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


def _show(text: str) -> None:
    """Show what a hook has printed, which may be the words of a model, without its commands."""
    text = printable(text.replace("\r\n", "\n").replace("\r", "\n"))
    # the launcher that reads this rank's output may have ended
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
