"""Identity of the code that a benchmark runs: commit, local changes, the files that it ran."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.ran_files import ran_files
from benchmarks.table import Code

ROOT = Path(__file__).parents[1]
# commit of a copy without .git, as `git describe --always --dirty` writes it
COMMIT_ENV = "SPMD_RL_COMMIT"
CHANGED = "-dirty"
# paths that can change a figure
MEASURED = ("spmd_rl", "benchmarks", "examples", "tests", ":!benchmarks/results")


def measured_code(rooms: Iterable[str] = ()) -> Code:
    """Return the code in this folder, with commit "" if neither git nor the variable has it.

    `rooms` ran in other processes.
    """
    given, ran = os.environ.get(COMMIT_ENV, ""), ran_files(rooms)
    if given:
        return Code(commit=given.removesuffix(CHANGED), dirty=given.endswith(CHANGED), ran=ran)
    if not (ROOT / ".git").exists():
        return Code(commit="", dirty=None, ran=ran)
    changes = _git("status", "--porcelain", "--", *MEASURED)
    return Code(commit=_git("rev-parse", "HEAD"), dirty=bool(changes), ran=ran)


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()
