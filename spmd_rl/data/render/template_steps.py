"""Bound on the steps of a chat template, so that one that loops is refused, and not waited for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_STEPS = 20_000_000  # lines of a compiled template; 100,000 messages take a few millions
_FILE = "<template>"  # where jinja says that the code of a template stands


@contextmanager
def bounded_steps() -> Iterator[None]:
    """Let templates take `MAX_STEPS` in this thread.

    A thread cannot be stopped from outside, so the interpreter asks at each line.
    Raises: RuntimeError after the last step.
    """
    left = most = MAX_STEPS

    def at_line(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(
                f"it loops, as it has run {most:,} lines: give the model's folder another one"
            )
        return at_line

    def at_call(frame: FrameType, event: str, given: Any) -> Any:
        return at_line if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)
