"""Exit code of a command: an error ends it with one sentence on stderr."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.errors import SpmdError

FAILED = 1
FAILED_BY_COMMAND = {"mismatch": 3}  # its exit code 1 says that the two paths differ
# OpenMP threads that wait spin for this many rounds. The default keeps a core busy that another
# thread may need.
SPIN_COUNT = "1000"


def run_guarded(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Return the exit code of `command(words)`; an error prints one sentence instead."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    failed = FAILED_BY_COMMAND.get(words[0], FAILED) if words else FAILED
    try:
        return command(words)
    except SpmdError as error:
        exit_message.write(str(error))
        return failed if error.exit_code == FAILED else error.exit_code
    except KeyboardInterrupt:
        exit_message.write("ended by SIGINT")
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001  an unforeseen error also ends with one sentence
        from spmd_rl.controller.run.controller_main import explain

        exit_message.write(str(explain(error, verbose=False)))
        return failed
