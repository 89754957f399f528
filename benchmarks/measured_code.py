"""Identity of the code that a benchmark runs: commit, local changes, digest of the kernels."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.table import Code

ROOT = Path(__file__).parents[1]
# commit of a copy without .git, as `git describe --always --dirty` writes it
COMMIT_ENV = "SPMD_RL_COMMIT"
CHANGED = "-dirty"
# paths that can change a figure
MEASURED = ("spmd_rl", "benchmarks", "examples", "tests", ":!benchmarks/results")


def measured_code() -> Code:
    """Return the code in this folder, with commit "" if neither git nor the variable has it."""
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
    """Return the digest of spmd_rl/kernels, as in a run's numeric contract."""
    from spmd_rl.kernels.contract import SOURCES, digest_of

    return digest_of(SOURCES)


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()
