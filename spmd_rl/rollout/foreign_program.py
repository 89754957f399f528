"""One run of a program of ours under another interpreter, where SGLang lives with its own packages.

The program's output goes to a file, so that an error can quote its last line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmd_rl.errors import DeadlineError, SpmdError
from spmd_rl.mesh.environment import without_world
from spmd_rl.rollout.interpreter import Interpreter, meeting_environment

MAX_CHARACTERS = 400  # of the output's last line, in an error


def run_program(
    program: Path,
    arguments: Sequence[str],
    *,
    python: str,
    folder: Path,
    name: str,
    deadline_s: float,
) -> None:
    """Run `program` to its end. Its output goes to a file in `folder`.

    `python` is an interpreter, or a folder of packages for this one; "" is this one as it is.
    `name` names the program in errors.

    Blocks: until the program ends; `deadline_s` ends it with all that it started.
    Raises: SpmdError with the last line of the output if it fails.
    """
    interpreter = Interpreter.of(python)
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [interpreter.command, str(program), *arguments],
            env=_environment(os.environ, interpreter.search_path, folder / "store"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"{name} was not done within {deadline_s:g} s") from None
        finally:
            _end(process)
    if code:
        raise SpmdError(f"{name} ended with exit code {code}: {_last_line(output)}")


def _environment(environment: Mapping[str, str], search_path: str, store: Path) -> dict[str, str]:
    """Return the program's environment: this one without the variables of the world around it.

    It is a world of one rank, which meets nobody.
    """
    return (
        without_world(environment)
        | meeting_environment(store)
        | {
            "PYTHONPATH": search_path,
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "HF_HUB_OFFLINE": "1",
        }
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    printable = "".join(character if character.isprintable() else " " for character in last)
    return printable[-MAX_CHARACTERS:]
