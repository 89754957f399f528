"""Output of a process of hooks: read from a pipe with a bound, shown on the rank's stderr.

A hook that prints more than the bound waits in its `print`, as if the reader were slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable

from spmd_rl.errors import printable

PIPE_BYTES = 1 << 20  # what a process may print while its rank is busy
READ_BYTES_PER_S = 1 << 20
SHOWN_BYTES_PER_S = 1 << 16
TAIL_BYTES = 4096  # kept for the sentence about a process that died
_READ_BYTES = 1 << 16


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
        self._refilled_at = clock()
        self._to_read, self._to_show = READ_BYTES_PER_S, SHOWN_BYTES_PER_S
        self._num_hidden = 0
        self._tail = b""

    @property
    def fileno(self) -> int:
        return self._descriptor

    @property
    def tail(self) -> str:
        """The end of what was printed."""
        return self._tail.decode(errors="replace")

    def read(self) -> bool:
        """Read and show what there is; return whether more may be read at once.

        False says that the bound of this second is reached.
        """
        self._refill()
        if not self._to_read:
            return False
        try:
            data = os.read(self._descriptor, min(_READ_BYTES, self._to_read))
        except BlockingIOError:
            return True
        self._to_read -= len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        shown, hidden = data[: self._to_show], data[self._to_show :]
        self._to_show -= len(shown)
        self._num_hidden += len(hidden)
        if shown:
            self._write(shown.decode(errors="replace"))
        return self._to_read > 0

    def close(self) -> None:
        os.close(self._descriptor)

    def _refill(self) -> None:
        now = self._clock()
        if now - self._refilled_at < 1:
            return
        self._refilled_at = now
        self._to_read, self._to_show = READ_BYTES_PER_S, SHOWN_BYTES_PER_S
        if self._num_hidden:
            self._write(f"\n({self._num_hidden:,} more bytes of a hook's output are left out)\n")
            self._num_hidden = 0


def _show(text: str) -> None:
    """Show what a hook has printed, which may be the words of a model, without its commands."""
    text = printable(text.replace("\r\n", "\n").replace("\r", "\n"))
    # the launcher that reads this rank's output may have ended
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
