"""Output of a process of hooks: read from a pipe, and shown on the rank's stderr up to a bound."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable

from spmd_rl.errors import printable

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


def _show(text: str) -> None:
    """Show what a hook has printed, which may be the words of a model, without its commands."""
    text = printable(text.replace("\r\n", "\n").replace("\r", "\n"))
    # the launcher that reads this rank's output may have ended
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
