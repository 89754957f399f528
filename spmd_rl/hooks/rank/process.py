"""One process of hooks, seen from its rank: it is started, sent calls, read and killed.

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
from collections.abc import Mapping
from typing import Any

from spmd_rl.controller.channel.codec import pack
from spmd_rl.controller.lifecycle.process_family import MARK_ENV, end_family
from spmd_rl.errors import ContractError, SpmdError
from spmd_rl.hooks.rank.output import Output
from spmd_rl.hooks.wire.answer_ring import Rewards
from spmd_rl.hooks.wire.frames import FrameReader, frame
from spmd_rl.hooks.wire.messages import DAMAGED_EXIT, TO_RANK, Start, ToProcess, ToRank
from spmd_rl.hooks.wire.running_note import Running, RunningNote
from spmd_rl.mesh.environment import without_world

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmd_rl.hooks.child.main import main; main(*map(int, sys.argv[2:]))"
)
_RECEIVE_BYTES = 1 << 18


class HookProcess:
    """A process that imports hooks and runs them. All but `__init__` return at once.

    `selector` is told its descriptors. The process dies with the thread that started it, because
    Linux sends its parent-death signal then. So a rank starts it from the main thread.
    """

    def __init__(self, start: Start, selector: selectors.BaseSelector) -> None:
        """Start the process. Raises: SpmdError outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise SpmdError("start hooks from the main thread: their processes end with it")
        self._selector = selector
        note = RunningNote.create()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._output = Output()
        self._mark = secrets.token_hex(8)
        with theirs:
            self._process = _started(theirs.fileno(), note, self._output.writing_end, self._mark)
        os.close(self._output.writing_end)
        self._note = RunningNote(note)
        os.close(note)
        self._reader, self._unsent = FrameReader(), bytearray()
        self._exit_descriptor = _exit_descriptor(self._process.pid)
        for descriptor in self._descriptors():
            selector.register(descriptor, selectors.EVENT_READ, self)
        self._reads_output = True
        self.garbled = False  # bytes came through the socket that are no message
        self.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> str:
        """The end of what the process printed."""
        return self._output.tail

    @property
    def has_unread_output(self) -> bool:
        """Return whether the bound of this second kept output from being read."""
        return not self._reads_output

    def send(self, message: ToProcess) -> None:
        """Send a message; what the socket does not take now goes with the next `flush`."""
        self._unsent += frame(pack(message))
        self.flush()

    def flush(self) -> None:
        """Send what was not sent yet, as far as the socket takes it."""
        waited = len(self._unsent) > 0
        # a process that has ended is noticed by `exit_sentence`
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        if waited:
            writes = selectors.EVENT_WRITE if self._unsent else 0
            self._selector.modify(self._socket, selectors.EVENT_READ | writes, self)

    def receive(self) -> list[ToRank]:
        """Return the messages that have come, send what is unsent, and show what was printed."""
        self._read_output()
        if self._unsent:
            self.flush()
        messages: list[ToRank] = []
        # the other end may be closed while the process still runs
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while not self.garbled and (data := self._socket.recv(_RECEIVE_BYTES)):
                for packed in self._reader.feed(data):
                    try:
                        messages.append(TO_RANK.unpack(packed))
                    except ContractError:
                        self.garbled = True
                self.garbled |= self._reader.is_garbled
                if len(data) < _RECEIVE_BYTES:
                    break
        return messages

    def running(self) -> Running | None:
        """Return the call that the process is running now."""
        return self._note.read()

    @property
    def num_answers(self) -> int:
        """How many answers the process has added to its ring."""
        return self._note.answers.num_added

    def take_answers(self, until: int | None = None) -> Rewards:
        """Return answers of the ring, as `AnswerRing.take` does."""
        return self._note.answers.take(until)

    def exit_sentence(self) -> str | None:
        """Return how the process ended, as the end of a sentence; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code == DAMAGED_EXIT:
            return "closed file descriptors of its process"
        if code >= 0:
            return f"ended its process with exit code {code}"
        return f"ended its process with {signal.Signals(-code).name}{_place(self.tail)}"

    def kill(self) -> None:
        """Kill the process and its group. It is reaped by `exit_sentence` or `close`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and what it started, and close all descriptors.

        Blocks: until the system has ended it.
        """
        if sys.platform == "linux":
            end_family(self._process.pid, self._mark)
        self.kill()
        self._process.wait()
        for descriptor in self._descriptors():
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        self._socket.close()
        self._output.close()
        if self._exit_descriptor is not None:
            os.close(self._exit_descriptor)

    def _descriptors(self) -> list[Any]:
        found: list[Any] = [self._socket, self._output.fileno, self._exit_descriptor]
        return [descriptor for descriptor in found if descriptor is not None]

    def _read_output(self) -> None:
        may_read = self._output.read()
        if may_read and not self._reads_output:
            self._selector.register(self._output.fileno, selectors.EVENT_READ, self)
        if not may_read and self._reads_output:  # it would be readable all the time
            self._selector.unregister(self._output.fileno)
        self._reads_output = may_read


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of hooks: the rank's own without the variables of its world."""
    kept = without_world(environment)
    if threads := environment.get("OMP_NUM_THREADS"):
        kept["OMP_NUM_THREADS"] = threads
    return kept


def _started(
    socket_fd: int, note_fd: int, output_fd: int, mark: str
) -> subprocess.Popen[bytes]:
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


def _exit_descriptor(pid: int) -> int | None:
    """Return a descriptor that can be read once the process has ended; Linux has them."""
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None


def _place(tail: str) -> str:
    """Return where in Python a process crashed, from what faulthandler printed."""
    lines = [line.strip() for line in tail.split("\n")]
    places = [line for line in lines if line.startswith('File "') and "spmd_rl" not in line]
    return f" (at {places[0]})" if places else ""
