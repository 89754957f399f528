"""Import guard: the import of a user's file ends in time, and does not end the process silently."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from spmd_rl.controller.lifecycle.process_family import MARK_ENV
from spmd_rl.controller.lifecycle.shutdown import end_process
from spmd_rl.errors import ConfigError, printable

WORD_S = 10.0  # after which a slow import is named on stderr
IMPORT_S = 120.0  # after which the process ends


@contextmanager
def importing(said: str, deadline_s: float = IMPORT_S) -> Iterator[None]:
    """Import a user's file in this context. `said` names it.

    A thread names an import on stderr that takes long, and ends the process at the deadline. It
    cannot do so while a program in C holds the interpreter's lock. In a process of hooks it only
    names it: the rank has a deadline of its own, and is told how the process ends.
    Raises: ConfigError when the file calls `os._exit`.
    """
    ended, is_of_hooks = threading.Event(), MARK_ENV in os.environ
    until_s = threading.TIMEOUT_MAX if is_of_hooks else deadline_s
    watch = threading.Thread(target=_watch, args=(ended, said, until_s), daemon=True)
    process, exit_now = os.getpid(), os._exit

    def refuse_exit(status: int) -> NoReturn:
        if os.getpid() != process:  # a process that the file has forked
            exit_now(status)
        raise ConfigError(f"{said}: importing it ends the process (os._exit, {status})")

    watch.start()
    if not is_of_hooks:
        os._exit = refuse_exit
    try:
        yield
    finally:
        os._exit = exit_now
        ended.set()


def _watch(ended: threading.Event, said: str, deadline_s: float) -> None:
    if ended.wait(min(WORD_S, deadline_s)):
        return
    if deadline_s > WORD_S:
        print(f"{printable(said)}: it is still being imported", file=sys.stderr, flush=True)
        if ended.wait(deadline_s - WORD_S):
            return
    end_process(
        f"{said}: it was not imported within {deadline_s:g} s: what takes long, or waits, belongs "
        "into a function that the run calls",
        ConfigError.exit_code,
    )
