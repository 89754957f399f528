"""Main function of the controller's process: it waits for the workers, runs the recipe, and ends
both with one error message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.shared_arrays import ControllerArrays
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.lifecycle.controller_process import Lifeline
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.lifecycle.shutdown import mark_done
from spmd_rl.controller.lifecycle.stack_server import StackServer
from spmd_rl.controller.run.recipe import Invocation, Recipe, load_recipe, run_config
from spmd_rl.controller.run.steps import RunObserver
from spmd_rl.controller.sleepers import SleepPolicy
from spmd_rl.errors import ConfigError, DiskError, RemoteError, SpmdError, printable
from spmd_rl.mesh.private_folder import MEMORY_FOLDER, PrivateFolder
from spmd_rl.mesh.world import World
from spmd_rl.observe.start_phase import start_phase

MakeObserver = Callable[[RunConfig, object, int], RunObserver]
PlanSettings = Callable[[object, int], Mapping[str, Mapping[str, Any]]]
DecideStart = Callable[[object, int], tuple[SleepPolicy, Sequence[str]]]

OBSERVER_CLOSE_S = 5.0  # how long the observer of a failed run may take
DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def run_controller(
    lifeline: Lifeline,
    address: str,
    invocation: Invocation,
    make_observer: MakeObserver,
    plan_settings: PlanSettings,
    decide_start: DecideStart,
) -> int:
    """Serve one run, from loading the recipe to the exit code.

    `make_observer(run, cfg, world_size)` returns the observer of the run. `plan_settings(cfg,
    world_size)` returns the settings that it adds to what the recipe spawns, by placement.
    `decide_start(cfg, world_size)` returns whether its roles sleep, and sentences to print.
    Blocks: as long as the recipe runs.
    """
    dispatcher: Dispatcher | None = None
    observer = RunObserver()
    error: SpmdError | None = None
    try:
        recipe = load_recipe(invocation.recipe)
        cfg = recipe.configure(invocation)
        run = run_config(cfg)
        dispatcher = _open(lifeline, address, run)
        world_size = dispatcher.roster.world_size
        observer = make_observer(run, cfg, world_size)
        dispatcher.final_message.leave_screen = observer.leave_screen
        dispatcher.on_counts = observer.on_counts
        planned = plan_settings(cfg, world_size)
        policy, sentences = decide_start(cfg, world_size)
        for sentence in sentences:
            print(sentence, flush=True)
        controller = Controller(run, dispatcher, observer, planned, policy)
        _run(recipe, cfg, controller, dispatcher, observer, lifeline.folder)
    except BaseException as raised:  # noqa: BLE001  a recipe may raise anything, even SystemExit
        error = explain(raised, invocation.verbose)
    if dispatcher is not None:
        dispatcher.stop(error)
    if error is not None:
        lifeline.send_final_message(error)  # for a rank 0 that has not joined yet
        _close(observer, lifeline, error.exit_code)
    lifeline.close()
    if error is not None:
        return error.exit_code
    mark_done()
    return 0


def _open(lifeline: Lifeline, address: str, run: RunConfig) -> Dispatcher:
    key = secret.from_environment()
    if key is None:
        raise ConfigError(
            "the controller was started without a secret: start the run with `spmd-rl run`"
        )
    generation = secrets.randbits(63)
    world, keys = World.from_env(), secret.derive_keys(key)
    shared = None
    if world.num_nodes == 1 and os.access(MEMORY_FOLDER, os.W_OK | os.X_OK):
        shared = ControllerArrays(PrivateFolder(in_memory=True))
    dispatcher = Dispatcher(
        run, world.size, address, keys, generation, lifeline.socket, lifeline.exit, shared
    )
    dispatcher.catch_signals(signal.SIGTERM, signal.SIGINT)
    lifeline.announce(dispatcher.endpoint, generation)
    return dispatcher


def _run(
    recipe: Recipe,
    cfg: object,
    controller: Controller,
    dispatcher: Dispatcher,
    observer: RunObserver,
    private: Path,
) -> None:
    with contextlib.closing(StackServer(private, controller.run_folder, dispatcher.stacks)):
        with start_phase("waiting until every rank reports"):
            dispatcher.wait_for_all()
        with dispatcher.recipe_deadline.running(time.monotonic()):
            recipe.main(controller, cfg)
            controller.close()
        observer.close()


def _close(observer: RunObserver, lifeline: Lifeline, exit_code: int) -> None:
    """Close the observer of a failed run, after the workers have ended.

    Blocks: for `OBSERVER_CLOSE_S` at most; then the process ends.
    """
    timer = threading.Timer(OBSERVER_CLOSE_S, lifeline.exit, [exit_code])
    timer.daemon = True
    timer.start()
    # An error here, such as a full disk, must not hide why the run ended.
    with contextlib.suppress(Exception):
        observer.close()
    timer.cancel()


def explain(raised: BaseException, verbose: bool) -> SpmdError:
    """Return an exception as the one error of the run; print the traceback of an unexpected one."""
    _print_traceback(raised, verbose)
    if isinstance(raised, SpmdError):
        return raised
    if _names_a_file(raised):
        kind = DiskError if raised.errno in DISK_ERRNOS else SpmdError
        return kind(f"{raised.filename}: {raised.strerror}")
    frame = traceback.extract_tb(raised.__traceback__)[-1]
    return SpmdError(
        f"{Path(frame.filename).name}:{frame.lineno}: {type(raised).__name__}: {raised}"
    )


def _print_traceback(raised: BaseException, verbose: bool) -> None:
    """Print the traceback of an exception, unless its message says enough."""
    if isinstance(raised, RemoteError):
        print(raised.remote_traceback, file=sys.stderr, flush=True)
    elif verbose or not (isinstance(raised, SpmdError) or _names_a_file(raised)):
        text = "".join(traceback.format_exception(raised))
        print(printable(text), end="", file=sys.stderr, flush=True)


def _names_a_file(raised: BaseException) -> TypeGuard[OSError]:
    """Whether this is an error of the system about a file, which needs no traceback."""
    return isinstance(raised, OSError) and bool(raised.filename and raised.strerror)
