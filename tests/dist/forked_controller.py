"""`spmd-rl` whose controller is forked from rank 0, which has imported what it needs.

To start Python and import that takes a controller half of the processor time of a small run.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import subprocess
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import NoReturn

from spmd_rl.cli.rank import run_rank
from spmd_rl.controller.lifecycle import controller_process, exit_message
from tests.dist.launched import spmd_rl


def forking(words: list[str]) -> int:
    """Be `spmd-rl` with these words, and return the exit code."""
    controller_process.start = fork
    return spmd_rl(words)


def fork(words: list[str], environment: dict[str, str], lifeline: int) -> subprocess.Popen[bytes]:
    """Fork the controller. `subprocess` never comes to the command that it is given."""
    be = partial(be_controller, ["controller", *words], environment, lifeline)
    return subprocess.Popen(
        ["false"],
        pass_fds=[lifeline],
        start_new_session=True,
        restore_signals=False,
        preexec_fn=be,
    )


def be_controller(words: list[str], environment: dict[str, str], lifeline: int) -> NoReturn:
    """Be a controller, and end with its exit code; what rank 0 has open or set is left behind."""
    code = 1
    try:
        os.closerange(3, lifeline)
        os.closerange(lifeline + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        exit_message._launcher_pids.clear()
        gc.enable()
        run_sitecustomize()
        code = run_rank(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # the fork must end here, and not go on as rank 0 would
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_sitecustomize() -> None:
    """Run the file that Python runs at its start."""
    files = [Path(name) / "sitecustomize.py" for name in os.environ["PYTHONPATH"].split(os.pathsep)]
    if found := next((file for file in files if file.exists()), None):
        runpy.run_path(str(found))
