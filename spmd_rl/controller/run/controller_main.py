"""The controller's process: it waits for the workers, runs the recipe, and ends both with one
account of it.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel import secret
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.lifecycle.controller_process import Lifeline
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.lifecycle.shutdown import mark_done
from spmd_rl.controller.lifecycle.stack_server import StackServer
from spmd_rl.controller.run.recipe import Invocation, Recipe, load_recipe, run_config
from spmd_rl.controller.run.steps import Observer
from spmd_rl.errors import ConfigError, DiskError, RemoteError, SpmdError
from spmd_rl.mesh.world import World

Watch = Callable[[RunConfig, Any, int], Observer]
Complete = Callable[[Any, int], Any]

CLOSE_S = 5.0
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def run_controller(
    lifeline: Lifeline, address: str, invocation: Invocation, watch: Watch, complete: Complete
) -> int:
    """Serve one run, from loading the recipe to the exit code.

    `watch(run, cfg, world_size)` makes its observer; `complete(cfg, world_size)` is the config that
    the recipe gets, with what is known now that the world is.
    Blocks: as long as the recipe runs.
    """
    board: Dispatcher | None = None
    observer: Observer | None = None
    error: SpmdError | None = None
    try:
        recipe = load_recipe(invocation.recipe)
        cfg = recipe.configure(invocation)
        board = _open(lifeline, address, cfg)
        world_size = board.roster.world_size
        observer = watch(run_config(cfg), cfg, world_size)
        board.final_message.leave_screen = observer.leave_screen
        _run(recipe, complete(cfg, world_size), board, observer, lifeline.folder)
    except BaseException as raised:  # noqa: BLE001  a recipe may raise anything, sys.exit too: the run's last words
        error = explain(raised, invocation.verbose)
    if board is not None:
        board.stop(error)
    if error is not None:
        lifeline.send_final_message(error)  # for a rank 0 that had not come yet
        _close(observer, lifeline, error.exit_code)
    lifeline.close()
    if error is not None:
        return error.exit_code
    mark_done()
    return 0


def _open(lifeline: Lifeline, address: str, cfg: Any) -> Dispatcher:
    key = secret.from_environment()
    if key is None:
        raise ConfigError(
            "the controller was started without a secret: it is rank 0 that starts it"
        )
    generation = secrets.randbits(63)
    size, keys = World.from_env().size, secret.derive_keys(key)
    board = Dispatcher(
        run_config(cfg), size, address, keys, generation, lifeline.socket, lifeline.exit
    )
    board.catch_signals(signal.SIGTERM, signal.SIGINT)
    lifeline.announce(board.endpoint, generation)
    return board


def _run(recipe: Recipe, cfg: Any, board: Dispatcher, observer: Observer, private: Path) -> None:
    run = run_config(cfg)
    with contextlib.closing(StackServer(private, run.path, board.stacks)):
        board.wait_for_all()
        with board.recipe_deadline.running(time.monotonic()):
            controller = Controller(run, board, observer)
            recipe.main(controller, cfg)
            controller.close()
        observer.close()


def _close(observer: Observer | None, lifeline: Lifeline, exit_code: int) -> None:
    """Let the observer of a failed run draw its last, when the workers have ended already; it has
    `CLOSE_S`.
    """
    limit = threading.Timer(CLOSE_S, lifeline.exit, [exit_code])
    limit.daemon = True
    limit.start()
    # a full disk, or whatever else ended the run, must not hide why it ended
    with contextlib.suppress(Exception):
        if observer is not None:
            observer.close()
    limit.cancel()


def explain(raised: BaseException, verbose: bool) -> SpmdError:
    """The error as the run's one sentence; the traceback of what nobody foresaw goes to stderr
    before it.
    """
    if isinstance(raised, RemoteError):
        print(raised.remote_traceback, file=sys.stderr, flush=True)
    elif verbose or not (isinstance(raised, SpmdError) or _names_a_file(raised)):
        traceback.print_exception(raised)
        sys.stderr.flush()
    if isinstance(raised, SpmdError):
        return raised
    if _names_a_file(raised):
        kind = DiskError if raised.errno in NO_ROOM else SpmdError
        return kind(f"{raised.filename}: {raised.strerror}")
    frame = traceback.extract_tb(raised.__traceback__)[-1]
    return SpmdError(
        f"{Path(frame.filename).name}:{frame.lineno}: {type(raised).__name__}: {raised}"
    )


def _names_a_file(raised: BaseException) -> TypeGuard[OSError]:
    """Whether the system says it all: a disk is full, a folder is not ours."""
    return isinstance(raised, OSError) and bool(raised.filename and raised.strerror)
