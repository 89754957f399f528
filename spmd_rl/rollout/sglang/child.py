"""Program of the child: it binds its life to its rank's, and runs SGLang's scheduler.

    python child.py SOCKET_FD PARENT_PID

SGLang's own packages come first on the search path. This file loads the package that it lies in by
its place, so that none of our packages is put before SGLang's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
EXIT_CODE = 3  # of a scheduler that failed; its output holds the traceback


def end_with_parent(parent_pid: int) -> None:
    """Have Linux end this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before
        os._exit(EXIT_CODE)


def load_package() -> None:
    """Make `spmd_rl` importable from the folder that this file lies in."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{PACKAGE} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE.name] = module
    spec.loader.exec_module(module)


def main(fd: int, parent_pid: int) -> None:
    began_s = time.monotonic()
    end_with_parent(parent_pid)
    load_package()
    from spmd_rl.rollout.sglang.child_scheduler import run
    from spmd_rl.rollout.sglang.messages import MESSAGES
    from spmd_rl.weights.slab.peer_socket import PeerFailure, PeerSocket

    peer = PeerSocket(socket.socket(fileno=fd), "the rank", MESSAGES)
    try:
        run(peer, began_s)
    except BaseException as error:  # noqa: BLE001 - whatever ends the scheduler is told to the rank
        traceback.print_exc()
        try:
            peer.send(PeerFailure(f"SGLang's scheduler ended: {type(error).__name__}: {error}"))
        except Exception:  # noqa: BLE001 - the rank is gone, and so its child ends
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
