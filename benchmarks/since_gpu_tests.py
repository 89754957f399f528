"""Count of files that have changed since the last results of tests/gpu; `make test` ends with it.

python -m benchmarks.since_gpu_tests
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.measured_code import ROOT
from benchmarks.table import Result, read_results

SCRIPT = "gpu_tests.py"
FOLDERS = ("spmd_rl", "tests/gpu")


def since(root: Path) -> str:
    """Return what has changed since, or why nobody knows."""
    ran = [one for one in read_results(root / "benchmarks/results") if one.script == SCRIPT]
    if not ran:
        return "tests/gpu has no results in benchmarks/results yet"
    last = max(ran, key=lambda one: one.date)
    commit = last.code.commit[:8] + (" with changed files" if last.code.dirty else "")
    return (
        f"tests/gpu ran last on {last.date} ({last.machine}, commit {commit}): "
        f"{_changes(root, last)}"
    )


def _changes(root: Path, last: Result) -> str:
    if not (root / ".git").exists():
        return "what has changed since is unknown, because this copy has no .git"
    try:
        counts = [_changed(root, last.code.commit, folder) for folder in FOLDERS]
    except FileNotFoundError:
        return "what has changed since is unknown, because git is not installed"
    except subprocess.CalledProcessError as error:  # as where a clone is shallow
        said = error.stderr.strip().splitlines()[0]
        return f"what has changed since is unknown, because git cannot compare with it ({said})"
    return f"{' and '.join(counts)} have changed since"


def _changed(root: Path, commit: str, folder: str) -> str:
    """Return how many files below `folder` differ from the commit, committed or not, or are new."""
    changed = _files(root, "diff", "--name-only", commit, "--", folder)
    new = _files(root, "ls-files", "--others", "--exclude-standard", "--", folder)
    present = _files(root, "ls-files", "--", folder)
    return f"{len(changed | new)} of {len(present | new | changed)} files of {folder}"


def _files(root: Path, *words: str) -> set[str]:
    command = ["git", *words]
    found = subprocess.run(command, cwd=root, text=True, capture_output=True, check=True)
    return set(found.stdout.splitlines())


if __name__ == "__main__":
    print(since(ROOT))
