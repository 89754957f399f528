"""One process of a torchrun world: a rank, or the controller that rank 0 starts."""

from __future__ import annotations

import resource
import signal
import sys
from functools import partial
from pathlib import Path

from spmd_rl.cli.exit_code import run_guarded
from spmd_rl.cli.help import USAGE
from spmd_rl.cli.launcher import END_SIGNALS
from spmd_rl.controller.channel.secret import require_on_many_nodes
from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.controller.lifecycle.controller_process import ControllerProcess, Lifeline
from spmd_rl.controller.lifecycle.shutdown import limit_exit
from spmd_rl.controller.run.recipe import Invocation, make_importable
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World
from spmd_rl.observe.stdio import make_stdio_failsafe

MAX_OPEN_FILES = 1 << 16


def is_process_of_a_run(words: list[str]) -> bool:
    """Return whether `python -m spmd_rl WORDS` was started as a part of a run: a rank of torchrun
    or its controller.
    """
    is_rank = words[:1] in (["run"], ["check"]) and World.is_around()
    return is_rank or words[:1] == ["controller"]


def rank_main() -> int:
    """Run `python -m spmd_rl` with the words of the command line, and return its exit code."""
    return run_rank(sys.argv[1:])


def run_rank(words: list[str]) -> int:
    """Be the process that `words` name, and return its exit code."""
    return run_guarded(_dispatch, words)


def _dispatch(words: list[str]) -> int:
    make_stdio_failsafe()
    exit_message.disown_children()
    match words:
        case ["run", *rest]:
            return _run_worker(rest)
        case ["controller", descriptor, folder, address, *rest]:
            return _run_controller(Lifeline(int(descriptor), Path(folder)), address, rest)
        case ["check", *rest]:
            from spmd_rl.check.command import main

            return main(rest)
    raise ConfigError(f"{USAGE}, or torchrun ... -m spmd_rl run RECIPE ...")


def _run_controller(lifeline: Lifeline, address: str, words: list[str]) -> int:
    from spmd_rl.controller.run.controller_main import run_controller
    from spmd_rl.plan.start import decide_start, settings
    from spmd_rl.report.recorder import Recorder

    watch = partial(Recorder, words=words)
    invocation = Invocation.parse(words)
    exit_code = run_controller(lifeline, address, invocation, watch, settings, decide_start)
    return limit_exit("the controller", exit_code)


def _run_worker(words: list[str]) -> int:
    """Join as a rank. Rank 0 starts the controller first, so that it loads while torch does."""
    for number in END_SIGNALS:
        # handlers inherited from a launcher would wait for C++ code to return, or be lost
        signal.signal(number, signal.SIG_DFL)
    exit_message.remember_launcher()
    raise_open_file_limit()
    world = World.from_env()
    require_on_many_nodes(world)
    make_importable(Invocation.parse(words).recipe)
    controller = ControllerProcess(world, words) if world.rank == 0 else None
    if world.restart and world.rank == 0:
        reason = exit_message.reason_of_restart()
        print(f"start {world.restart + 1} of the ranks: {reason}", file=sys.stderr)
    from spmd_rl.controller.worker_process import run_worker

    return limit_exit(f"rank {world.rank}", run_worker(world, controller))


def raise_open_file_limit() -> None:
    """Allow this process as many open files as the system does, `MAX_OPEN_FILES` at most.

    The controller has a socket for every rank, and gloo one for every pair of ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
