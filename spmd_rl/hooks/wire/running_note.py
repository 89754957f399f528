"""Note of the call that a process of hooks is running: memory that it shares with its rank.

The rank reads there whom a death or a hang is to be blamed on, without waiting for the process. The
ring of the process's answers lies behind it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from typing import NamedTuple

from spmd_rl.hooks.wire.answer_ring import SIZE_BYTES, AnswerRing

NOBODY = -1  # no hook is running
_CALL, _SINCE, _THREADS = 0, 1, 2  # places of 8 bytes
_RING_AT = 64  # bytes
_ALL_BYTES = _RING_AT + SIZE_BYTES


class Running(NamedTuple):
    """The call that is running, since when on the monotonic clock, and whether threads of others
    may run beside it.
    """

    call_id: int
    since_s: float
    beside_threads: bool = False


class RunningNote:
    """One end of the note. The process writes it, the rank reads it."""

    def __init__(self, descriptor: int) -> None:
        memory = memoryview(mmap.mmap(descriptor, _ALL_BYTES))
        self._places = memory[:_RING_AT].cast("q")
        self.answers = AnswerRing(memory[_RING_AT:])
        self._lock = threading.Lock()  # of the threads of this process

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new note, in a temporary file without a name."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_ALL_BYTES)
            descriptor = os.dup(file.fileno())
        RunningNote(descriptor).clear()
        return descriptor

    def write(self, call_id: int) -> None:
        """Note that this call runs from now on."""
        # The time goes first: a reader between the two writes takes the older call as the younger.
        self._places[_SINCE] = time.monotonic_ns()
        self._places[_CALL] = call_id

    def add_thread(self, change: int) -> None:
        """Note that a thread has begun (1) or ended (-1)."""
        with self._lock:
            self._places[_THREADS] += change

    def clear(self) -> None:
        """Note that no hook is running."""
        self._places[_CALL] = NOBODY

    def read(self) -> Running | None:
        """Return the call that is running; None if there is none."""
        call_id = self._places[_CALL]
        if call_id == NOBODY:
            return None
        return Running(call_id, self._places[_SINCE] / 1e9, self._places[_THREADS] > 0)
