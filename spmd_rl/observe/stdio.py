"""stdout and stderr of a run, which lasts longer than who reads them may: a pager, `tee`, a
terminal, a full disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class FailsafeStream:
    """A standard stream: once the system takes no more of it, what is written goes nowhere, and who
    writes goes on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self._stream.flush()

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # what is buffered goes there too
            print(
                f"{self._stream.name} takes no more ({error.strerror}): this goes on without",
                file=sys.stderr,
            )


def make_stdio_failsafe() -> None:
    """Have stdout and stderr of this process be `FailsafeStream`; those that were closed before it began
    go nowhere.
    """
    sys.stdout, sys.stderr = (
        cast(TextIO, FailsafeStream(stream or open(os.devnull, "w")))  # noqa: SIM115  for as long as the process lives
        for stream in (sys.stdout, sys.stderr)
    )
