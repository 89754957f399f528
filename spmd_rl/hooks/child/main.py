"""Program of a process of hooks: it imports the hooks, and runs them until its rank ends."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

from spmd_rl.errors import ConfigError
from spmd_rl.hooks.child.calls import LoadedHooks
from spmd_rl.hooks.child.process_state import SeedWatch
from spmd_rl.hooks.child.server import serve
from spmd_rl.hooks.wire.channel import CallNote, MessageReader, encode
from spmd_rl.hooks.wire.messages import TO_PROCESS, Ready, Start

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_RECEIVE_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None)  # loaded before anything forks


def main(socket_fd: int, note_fd: int, parent_pid: int) -> None:
    """Serve calls until the rank ends. Its program is `worker.PROGRAM`."""
    _end_with_parent()
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)
    _keep_orphans()
    seeds = SeedWatch()
    os.register_at_fork(after_in_child=_end_with_parent)
    faulthandler.enable(all_threads=False)
    sock = socket.socket(fileno=socket_fd)
    start = _first_message(sock)
    if start is None:
        return
    try:
        hooks = LoadedHooks.of(start)
    except ConfigError as error:
        sock.sendall(encode(Ready([], str(error))))
        return
    serve(sock, CallNote(note_fd), seeds, hooks, start)


def _first_message(sock: socket.socket) -> Start | None:
    """Return what the rank sends first, after which it waits. Blocks: until then, or its end."""
    reader = MessageReader(TO_PROCESS)
    while data := sock.recv(_RECEIVE_BYTES):
        for message in reader.feed(data):
            return message if isinstance(message, Start) else None
    return None


def _keep_orphans() -> None:
    """Have what loses its parent below this process become its child (process_family.py)."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_with_parent() -> None:
    """Have Linux end this process when the thread that started it ends."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
