"""The command line: from words to what they ask for.

`spmd-rl run` checks the config, then becomes torchrun's launcher; each rank that torchrun starts
arrives in `rank_main`. Every other command is answered in this process.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from spmd_rl import __version__
from spmd_rl.cli.help import USAGE, no_command, of_recipe, of_run, overview
from spmd_rl.cli.launcher import ENDINGS, endings, launch
from spmd_rl.config.dump import dump_toml
from spmd_rl.controller.channel.secret import refuse_none
from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.controller.lifecycle.controller_process import ControllerProcess, Lifeline
from spmd_rl.controller.lifecycle.stacks import ask, show
from spmd_rl.controller.run.recipe import Invocation, load_recipe, make_importable, run_config
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.mesh.split import plan_split
from spmd_rl.observe.provenance import note_beginning
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.observe.run_lock import launching, refuse_live
from spmd_rl.observe.stdio import let_streams_last

HELP = {"--help", "-h"}
FAILED = 1
FAILED_OF = {"mismatch": 3}  # whose 1 is an answer
OPEN_FILES = 1 << 16
# of a thread that waits for another: by default it keeps the core that the other needs, if all are
# busy
SPINS = "1000"


def main() -> int:
    """`spmd-rl`: check the config, then launch ranks on this machine."""
    os.environ.pop(exit_message.ERROR_FILE_ENV, None)  # of a torchrun that this is no rank of
    return _guarded(_main, sys.argv[1:])


def rank_main() -> int:
    """`python -m spmd_rl`: one rank of a torchrun world, or the controller that rank 0 starts."""
    return _guarded(_rank_main, sys.argv[1:])


def _guarded(command: Callable[[list[str]], int], words: list[str]) -> int:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded
    failed = FAILED_OF.get(words[0], FAILED) if words else FAILED
    try:
        return command(words)
    except SpmdError as error:
        exit_message.write(str(error))
        return failed if error.exit_code == FAILED else error.exit_code
    except KeyboardInterrupt:
        exit_message.write("ended by SIGINT")
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001  nobody foresaw it: its traceback, and one sentence like any other's
        from spmd_rl.controller.run.controller_main import explain

        exit_message.write(str(explain(error, verbose=False)))
        return failed


def _main(words: list[str]) -> int:
    if words[:1] == ["run"] and len(words) > 1 and not HELP & set(words):
        return _run(words[1:])
    try:
        try:
            return _answer(words)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # who reads has read enough, such as `head`
        # what is buffered still goes there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _answer(words: list[str]) -> int:
    """Do what starts no ranks."""
    asked_for_help = bool(HELP & set(words)) and words[0] != "run"
    match [words[0], "--help"] if asked_for_help else words:
        case ["--version", *_]:
            print(f"spmd-rl {__version__}")
            return 0
        case ["stacks", *rest]:
            return _stacks(rest)
        case ["check", *rest]:
            from spmd_rl.check import check

            return check(rest)
        case ["plan", *rest]:
            from spmd_rl.plan import main as plan

            return plan(rest)
        case ["report", *rest]:
            from spmd_rl.report import main as report

            return report(rest)
        case ["rewind", *rest]:
            from spmd_rl.controller.run.command import main as rewind

            return rewind(rest)
        case ["submit", *rest]:
            from spmd_rl.slurm import submit

            return submit(rest)
        case ["export", *rest]:
            from spmd_rl.train.export import main as export

            return export(rest)
        case ["mismatch", *rest]:
            # torch's profiler reads it at import, and talks
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            from spmd_rl.microscope.command import main as mismatch

            return mismatch(rest)
        case ["trace", *rest]:
            from spmd_rl.observe.timeline import main as trace

            return trace(rest)
    return _help(words)


def _run(words: list[str]) -> int:
    """Check the config here, where a mistake costs nothing, then launch."""
    note_beginning()
    for number in endings():
        signal.signal(number, _end_before_launch)
    _open_many_files()
    invocation = Invocation.parse(words)
    cfg = load_recipe(invocation.recipe).accept(invocation)
    num_ranks = invocation.nproc or getattr(cfg, "nproc", 0) or 0
    if num_ranks and hasattr(cfg, "split"):
        plan_split(cfg.split, num_ranks)
    run = run_config(cfg)
    folder = RunFolder(run.path)
    folder.refuse_other(dump_toml(cfg), run.resume)
    refuse_live(run.path)
    folder.make()
    signal.signal(signal.SIGQUIT, lambda *_: show(run.path))
    _say_start(num_ranks)
    with launching(run.path):
        return launch(
            num_ranks, _forked_rank, ["run", *words], invocation.max_restarts, run.grace_s
        )


def _say_start(num_ranks: int) -> None:
    """Tell whoever watches a terminal why nothing happens yet: torch is imported, and the ranks
    meet.
    """
    if sys.stdout.isatty():
        print(
            f"starting {num_ranks or 'the'} {'rank' if num_ranks == 1 else 'ranks'} ...", flush=True
        )


def _end_before_launch(number: int, frame: FrameType | None) -> None:
    """End at once: nothing is started yet, and an exception could be lost in whatever is being
    imported.
    """
    exit_message.end_process(
        f"the run was ended by {signal.Signals(number).name} before it began", 128 + number
    )


def _stacks(words: list[str]) -> int:
    """Print the Python stacks of every rank of a live run."""
    if len(words) != 1 or HELP & set(words):
        return _say("usage: spmd-rl stacks RUN", asked=bool(HELP & set(words)))
    print(ask(Path(words[0])))
    return 0


def _help(words: list[str]) -> int:
    match words:
        case ["run", recipe, *_] if not recipe.startswith("-"):
            text = of_recipe(recipe)
        case ["run", *_]:
            text = of_run()
        case [] | ["--help" | "-h", *_]:
            text = overview()
        case [word, *_]:
            raise no_command(word)
    return _say(text, asked=bool(HELP & set(words)))


def _say(text: str, asked: bool) -> int:
    """Help where it was asked for, which is no mistake, and else as one's answer."""
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _rank_main(words: list[str]) -> int:
    let_streams_last()
    exit_message.are_not_of_children()
    match words:
        case ["run", *rest]:
            return _rank(rest)
        case ["controller", descriptor, folder, address, *rest]:
            from spmd_rl.controller.run.controller_main import run_controller
            from spmd_rl.plan.resolve import planned_settings
            from spmd_rl.report.recorder import Recorder

            lifeline = Lifeline(int(descriptor), Path(folder))
            watch = partial(Recorder, words=rest)
            invocation = Invocation.parse(rest)
            exit_code = run_controller(lifeline, address, invocation, watch, planned_settings)
            return exit_message.leave("the controller", exit_code)
        case ["check", *rest]:
            from spmd_rl.check import check

            return check(rest)
    raise ConfigError(f"{USAGE}, or torchrun ... -m spmd_rl run RECIPE ...")


def _rank(words: list[str]) -> int:
    """Join as a rank. Rank 0 starts the controller first, so that it loads while torch does."""
    for number in ENDINGS:
        # a launcher's handlers, inherited, would wait for C++ code, or be lost
        signal.signal(number, signal.SIG_DFL)
    exit_message.note_launcher()
    _open_many_files()
    from spmd_rl.mesh.world import World

    world = World.from_env()
    refuse_none(world)
    make_importable(Invocation.parse(words).recipe)
    controller = ControllerProcess(world, words) if world.rank == 0 else None
    if world.restart and world.rank == 0:
        print(
            f"start {world.restart + 1} of the ranks: {exit_message.of_the_start_before()}",
            file=sys.stderr,
        )
    from spmd_rl.controller.worker import run_worker

    return exit_message.leave(f"rank {world.rank}", run_worker(world, controller))


def _forked_rank(words: list[str]) -> int:
    return _guarded(_rank_main, words)


def _open_many_files() -> None:
    """As many as the system lets us: the controller has a socket for every rank, gloo one for every
    pair of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
