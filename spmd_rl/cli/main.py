"""The command line: find the command that was named, and run it.

`spmd-rl` and `python -m spmd_rl` arrive in `main`. Each rank that torchrun starts arrives in
`rank.rank_main` instead.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from spmd_rl import __version__
from spmd_rl.cli.exit_code import run_guarded
from spmd_rl.cli.help import COMMANDS, HELP_FLAGS, no_command, of_eval, overview, starts_ranks
from spmd_rl.controller.lifecycle.exit_message import ERROR_FILE_ENV
from spmd_rl.observe.stdio import printable_stdout

# torch's profiler, which `mismatch` uses, reads its log level at import and is chatty by default
QUIET_PROFILER = ("KINETO_LOG_LEVEL", "6")
# counting GPUs must not initialise CUDA before `mismatch` forks ranks
COUNT_GPUS_ALONE = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def main() -> int:
    """Run the command that the command line names, and return its exit code."""
    os.environ.pop(ERROR_FILE_ENV, None)  # it belongs to a torchrun that this is no rank of
    return run_guarded(dispatch, sys.argv[1:])


def dispatch(words: list[str]) -> int:
    """Run the command that the first of `words` names; the others are its arguments."""
    if words[:1] == ["eval"] and not HELP_FLAGS & set(words):
        words = ["run", "evaluate", *words_of_evaluation(words[1:])]
    if starts_ranks(words):
        return _run_command(words)
    try:
        try:
            with printable_stdout():
                return _answer(words)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # the reader has read enough, as `head` does
        # the text that is still buffered has to go somewhere when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def words_of_evaluation(words: list[str]) -> list[str]:
    """Return the words of a run of `evaluate`, for those of `eval`.

    The first may be a model folder, a run or its checkpoint. Settings that are said go before.
    """
    if not words or words[0].startswith("-"):
        return words
    from spmd_rl.train.checkpoint.saved_run import checkpoint_of, named_run

    folder, *others = words
    named = named_run(Path(folder))
    if named is None:
        return [f"--model={folder}", *others]
    run, checkpoint = named
    weights = checkpoint or checkpoint_of(run, None)
    return [f"--config={run}", f"--checkpoint={weights}", *others]


def _answer(words: list[str]) -> int:
    """Run a command that starts no ranks."""
    if not words or words[0] in HELP_FLAGS:
        print(overview(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"spmd-rl {__version__}")
        return 0
    if words[0] == "eval":
        print(of_eval(words))
        return 0
    asks_for_help = words[0] != "run" and HELP_FLAGS & set(words)
    return _run_command([words[0], "--help"] if asks_for_help else words)


def _run_command(words: list[str]) -> int:
    name, *arguments = words
    if name not in COMMANDS:
        raise no_command(name)
    if name == "mismatch":
        os.environ.setdefault(*QUIET_PROFILER)
        os.environ.setdefault(*COUNT_GPUS_ALONE)
    exit_code: int = import_module(COMMANDS[name].module).main(arguments)
    return exit_code
