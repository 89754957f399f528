"""Count of files that have changed since the last run of the GPU tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from benchmarks.since_gpu_tests import since
from benchmarks.table import Code, Result

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(root: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    return subprocess.check_output(["git", *author, *words], cwd=root, text=True).strip()


def write_result(root: Path, commit: str, date: str, dirty: bool = False) -> None:
    code = Code(commit=commit, dirty=dirty)
    for machine, day in (("h100", "2026-01-01"), ("h200", date)):
        result = Result(
            script="gpu_tests.py", date=day, machine=machine, code=code, versions={}, rows=[]
        )
        path = root / f"benchmarks/results/{machine}/gpu_tests.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(result))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of five files, whose commit the GPU tests ran at."""
    for name in ("spmd_rl/a.py", "spmd_rl/b.py", "spmd_rl/c.py", "tests/gpu/d.py", "docs/e.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    write_result(tmp_path, git(tmp_path, "rev-parse", "HEAD"), "2026-02-03")
    return tmp_path


def test_committed_uncommitted_and_new_files_count(root: Path) -> None:
    commit = git(root, "rev-parse", "--short=8", "HEAD")
    run = f"tests/gpu ran last on 2026-02-03 (h200, commit {commit}): "
    assert since(root) == (
        f"{run}0 of 3 files of spmd_rl and 0 of 1 files of tests/gpu have changed since"
    )
    (root / "spmd_rl/a.py").write_text("other")
    (root / "docs/e.md").write_text("other")
    git(root, "commit", "--quiet", "--all", "-m", "second")
    (root / "spmd_rl/b.py").write_text("other")
    (root / "tests/gpu/new.py").write_text("new")
    assert since(root) == (
        f"{run}2 of 3 files of spmd_rl and 1 of 2 files of tests/gpu have changed since"
    )


def test_a_commit_that_the_clone_does_not_hold(root: Path) -> None:
    write_result(root, "c" * 40, "2026-02-03", dirty=True)
    assert since(root).startswith(
        "tests/gpu ran last on 2026-02-03 (h200, commit cccccccc with changed files): what has "
        "changed since is unknown, because git cannot compare with it (fatal: "
    )


def test_a_copy_without_git(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert since(root).endswith(" is unknown, because git is not installed")
    shutil.rmtree(root / ".git")
    assert since(root).endswith(" is unknown, because this copy has no .git")
    shutil.rmtree(root / "benchmarks")
    assert since(root) == "tests/gpu has no results in benchmarks/results yet"
