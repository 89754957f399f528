"""Shutdown of one process: its final message, and its exit whatever still runs in it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.errors import DeadlineError, DiskError, LostRankError, SpmdError
from spmd_rl.mesh.private_folder import leave_meeting_folder

_EXIT_NOW = os._exit  # which is another while a user's file is imported (import_guard.py)

DONE_FILE_ENV = "SPMD_RL_DONE_FILE"
EXIT_S = 5.0  # for threads and child processes to end, once the run has
LOOK_UP_S = 1.0  # for a disk and a terminal to answer before the final message goes out
RESUME_HINT = "the same command goes on"
# errors that the same command need not meet again
RECOVERABLE = (DeadlineError, DiskError, LostRankError)


class FinalMessage:
    """Composes the sentence that ends a run: the error, and after which step the run can resume.

    `newest_step` returns the step of the newest checkpoint, if there is one. `leave_screen` ends a
    live view, so that the terminal is free for the sentence.
    """

    def __init__(self) -> None:
        self.newest_step: Callable[[], int | None] = lambda: None
        self.leave_screen: Callable[[], object] = lambda: None

    def compose(self, error: SpmdError) -> str:
        """Add to a recoverable `error` how to resume, leave the screen, and return the sentence.

        Blocks: for `LOOK_UP_S` at most.
        """
        steps: list[int | None] = []
        thread = threading.Thread(
            target=self._look_up, args=[steps], name="final message", daemon=True
        )
        thread.start()
        thread.join(LOOK_UP_S)
        recoverable = isinstance(error, RECOVERABLE) and RESUME_HINT not in str(error)
        if recoverable and steps and steps[0] is not None:
            error.args = (f"{error}; {RESUME_HINT} after step {steps[0]}",)
        return str(error)

    def _look_up(self, steps: list[int | None]) -> None:
        # the run that resumes reports a checkpoint that cannot be read
        with contextlib.suppress(Exception):
            steps.append(self.newest_step())
        with contextlib.suppress(Exception):  # the terminal is gone
            self.leave_screen()


def mark_done() -> None:
    """Touch the file by which a batch script sees that the run has finished."""
    if path := os.environ.get(DONE_FILE_ENV):
        Path(path).touch()


def limit_exit(process: str, exit_code: int) -> int:
    """Have this process end within `EXIT_S`, and return `exit_code`; `process` names it.

    Otherwise user code could keep it alive for ever, such as a pool of a reward function with a
    request that nobody answers.
    """
    limit = threading.Timer(EXIT_S, _exit_regardless, [process, exit_code])
    limit.daemon = True
    limit.start()
    return exit_code


def end_process(sentence: str, exit_code: int) -> NoReturn:
    """Leave `sentence` as exit message and end now, whatever the other threads are doing."""
    exit_message.write(sentence)
    _exit(exit_code)


def _exit_regardless(process: str, exit_code: int) -> NoReturn:
    threads = {thread for thread in threading.enumerate() if not thread.daemon}
    names = [thread.name for thread in threads - {threading.main_thread()}]
    names += [child.name for child in multiprocessing.active_children()]
    print(
        f"{process} has ended without what still ran in it: "
        f"{', '.join(names) or 'an exit handler'}",
        file=sys.stderr,
    )
    _exit(exit_code)


def _exit(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # a pool of a reward function, for instance, does not end by itself
    for child in multiprocessing.active_children():
        child.kill()
    leave_meeting_folder()
    _EXIT_NOW(exit_code)
