"""The controller's process: it waits for the workers, runs the recipe, and ends both with one account of it."""

from __future__ import annotations

import secrets
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_rl.controller import secret
from spmd_rl.controller.config import RunConfig
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.recipe import Invocation, Recipe, load_recipe, run_config
from spmd_rl.controller.steps import Observer
from spmd_rl.controller.supervisor import Lifeline
from spmd_rl.controller.switchboard import Switchboard
from spmd_rl.errors import ConfigError, RemoteError, SpmdError
from spmd_rl.mesh.world import World


Watch = Callable[[RunConfig, Any, int], Observer]


def run_controller(lifeline: Lifeline, address: str, invocation: Invocation, watch: Watch) -> int:
    """Serve one run, from loading the recipe to the exit code; `watch(run, cfg, world_size)` makes its observer.

    Blocks: as long as the recipe runs.
    """
    board: Switchboard | None = None
    error: SpmdError | None = None
    try:
        recipe = load_recipe(invocation.recipe)
        cfg = recipe.configure(invocation)
        board = _open(lifeline, address, cfg)
        _run(recipe, cfg, board, watch)
    except Exception as raised:  # noqa: BLE001  a recipe may raise anything: it becomes the run's last words
        error = explain(raised, invocation.verbose)
    if board is not None:
        board.stop(error)
    if error is not None:
        lifeline.last_words(error)  # for a rank 0 that had not come yet
    lifeline.close()
    return error.exit_code if error is not None else 0


def _open(lifeline: Lifeline, address: str, cfg: Any) -> Switchboard:
    key = secret.given()
    if key is None:
        raise ConfigError("the controller was started without a secret: it is rank 0 that starts it")
    generation = secrets.randbits(63)
    board = Switchboard(
        run_config(cfg), World.from_env().size, address, secret.derive(key), generation, lifeline.socket
    )
    lifeline.announce(board.endpoint, generation)
    return board


def _run(recipe: Recipe, cfg: Any, board: Switchboard, watch: Watch) -> None:
    run = run_config(cfg)
    observer = watch(run, cfg, board.roster.world_size)
    try:
        board.wait_for_all()
        recipe.main(Controller(run, board, observer), cfg)
    finally:
        observer.close()


def explain(raised: Exception, verbose: bool) -> SpmdError:
    """The error as the run's one sentence; the traceback of what nobody foresaw goes to stderr before it."""
    if isinstance(raised, RemoteError):
        print(raised.remote_traceback, file=sys.stderr, flush=True)
    elif verbose or not isinstance(raised, SpmdError):
        traceback.print_exception(raised)
        sys.stderr.flush()
    if isinstance(raised, SpmdError):
        return raised
    frame = traceback.extract_tb(raised.__traceback__)[-1]
    return SpmdError(f"{Path(frame.filename).name}:{frame.lineno}: {type(raised).__name__}: {raised}")
