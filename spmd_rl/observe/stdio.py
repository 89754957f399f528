"""stdout and stderr that never fail, so that a run outlives its pager, `tee`, terminal or disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from spmd_rl.errors import printable


class _Stream:
    """A stream that is another one but for some methods."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class FailsafeStream(_Stream):
    """A standard stream whose writes never raise: after an error, all output is discarded."""

    def write(self, text: str) -> int:
        with self._discarding_on_error():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding_on_error():
            self._stream.flush()

    @contextmanager
    def _discarding_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # so is what was buffered
            print(
                f"cannot write to {self._stream.name} any more ({error.strerror}): "
                "its further output is discarded",
                file=sys.stderr,
            )


class PrintableStream(_Stream):
    """A stream to which control characters are written as escapes (`errors.printable`)."""

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)


@contextmanager
def printable_stdout() -> Iterator[None]:
    """Escape control characters that this process prints, since files of strangers are quoted."""
    with redirect_stdout(cast(TextIO, PrintableStream(sys.stdout))):
        yield


def make_stdio_failsafe() -> None:
    """Make stdout and stderr of this process failsafe. One that was closed is discarded."""
    sys.stdout, sys.stderr = (
        cast(TextIO, FailsafeStream(stream or open(os.devnull, "w")))  # noqa: SIM115  open until the process ends
        for stream in (sys.stdout, sys.stderr)
    )
