"""Start phase: what a run that starts is busy with, on stderr: at once on a terminal, else once it
is slow.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SLOW_S = 5.0


@contextmanager
def start_phase(text: str, slow_s: float = SLOW_S) -> Iterator[None]:
    """Say `text` while what runs inside takes time. No thread is left, so one may fork then."""
    if sys.stderr.isatty():
        _say(text)
        yield
        return
    timer = threading.Timer(slow_s, _say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)
