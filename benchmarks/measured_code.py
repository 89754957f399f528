"""Identity of the code that a benchmark runs: commit, local changes, digest of the kernels."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.table import Code

ROOT = Path(__file__).parents[1]
# the commit of a copy without .git, in the words of `git describe --always --dirty`
COMMIT_ENV = "SPMD_RL_COMMIT"
CHANGED = "-dirty"
# what can change a figure
MEASURED = ("spmd_rl", "benchmarks", "examples", "tests", ":!benchmarks/results")


def measured_code() -> Code:
    """The code in this folder; its commit is an empty string where neither git nor `SPMD_RL_COMMIT`
    knows it.
    """
    given = os.environ.get(COMMIT_ENV, "")
    if given:
        return Code(
            commit=given.removesuffix(CHANGED),
            dirty=given.endswith(CHANGED),
            kernels=kernels_digest(),
        )
    if not (ROOT / ".git").exists():
        return Code(commit="", dirty=None, kernels=kernels_digest())
    changes = _git("status", "--porcelain", "--", *MEASURED)
    return Code(commit=_git("rev-parse", "HEAD"), dirty=bool(changes), kernels=kernels_digest())


def kernels_digest() -> str:
    """Of the files of spmd_rl/kernels, as it stands in the numeric contract of a run."""
    from spmd_rl.kernels.contract import SOURCES, digest_of

    return digest_of(SOURCES)


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()
