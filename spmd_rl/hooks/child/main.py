"""Program of a process of hooks: it imports the hooks, and runs them until its rank ends."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

from spmd_rl.errors import ConfigError
from spmd_rl.hooks.child.loaded import LoadedHooks
from spmd_rl.hooks.child.plain_server import serve_plain
from spmd_rl.hooks.child.process_state import ProcessState
from spmd_rl.hooks.child.rank_link import RankLink
from spmd_rl.hooks.child.seed_watch import SeedWatch
from spmd_rl.hooks.wire.messages import NotReady, Ready, Serve, Start
from spmd_rl.hooks.wire.running_note import RunningNote

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)  # loaded before anything forks


def main(socket_fd: int, note_fd: int, parent_pid: int) -> None:
    """Serve calls until the rank ends. Its program is `process.PROGRAM`."""
    end_with_parent(parent_pid)
    _keep_orphans()
    seeds = SeedWatch()
    os.register_at_fork(after_in_child=_end_with_parent)
    faulthandler.enable(all_threads=False)
    link = RankLink(socket.socket(fileno=socket_fd))
    start = link.receive()
    if not isinstance(start, Start):
        return
    try:
        hooks = LoadedHooks.of(start)
    except ConfigError as error:
        link.send(NotReady(str(error)))
        return
    link.send(Ready([reward.form for reward in hooks.rewards]))
    serve = link.receive()
    if not isinstance(serve, Serve):
        return
    note, state = RunningNote(note_fd), ProcessState(seeds)
    if serve.kind == "plain":
        serve_plain(link, note, state, hooks)
        return
    from spmd_rl.hooks.child.async_server import serve_async  # plain hooks need no asyncio

    serve_async(link, note, state, hooks, serve)


def _keep_orphans() -> None:
    """Have what loses its parent below this process become its child (process_family.py)."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent_pid: int) -> None:
    """Have Linux end this process when the thread that started it ends."""
    _end_with_parent()
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
