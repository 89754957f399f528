"""What a run says of its start: command, commit, machine, and when it began."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from spmd_rl.observe import provenance


def git(folder: Path, *words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", "-C", str(folder), *name, *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_commit_is_named_and_a_changed_file_told(tmp_path: Path) -> None:
    assert provenance.commit_of(tmp_path / "missing") == ""
    git(tmp_path, "init", "-q")
    assert provenance.commit_of(tmp_path) == "", "no commit yet"
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "x")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert provenance.commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert provenance.commit_of(tmp_path) == f"{commit}-dirty"


def test_without_git_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit_of(Path.cwd()) == ""


def test_the_facts_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = provenance.provenance(["grpo", "--model=a b"], 12.0)
    assert facts["command"] == "spmd-rl run grpo '--model=a b'"
    assert (facts["folder"], facts["began_unix_s"]) == (str(tmp_path), 12.0)
    assert {"spmd_rl", "torch", "python", "host", "machine"} <= facts.keys()
    assert all(facts.values())
    assert "command" not in provenance.provenance([], 12.0)


def test_the_machine_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 9R14\n\nmodel name\t: other\n"
    )
    (tmp_path / "memory").write_text("MemTotal:       131072000 kB\n")
    for number in (0, 1):
        (tmp_path / f"gpus/{number}").mkdir(parents=True)
        (tmp_path / f"gpus/{number}/information").write_text("Model: \t\t NVIDIA H200\nIRQ:   7\n")
    for name, file in (("_CPUS", "cpu"), ("_MEMORY", "memory"), ("_GPUS", "gpus")):
        monkeypatch.setattr(provenance, name, tmp_path / file)
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert provenance.machine() == "AMD EPYC 9R14, 2 cores, 125 GiB, 2 x NVIDIA H200"
    for name in ("_CPUS", "_MEMORY", "_GPUS"):
        monkeypatch.setattr(provenance, name, tmp_path / "missing")
    assert provenance.machine().endswith(", 2 cores")


def test_a_run_begins_with_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.START_TIME_ENV, raising=False)
    before = time.time()
    assert before <= provenance.start_unix_s() <= time.time()
    monkeypatch.setenv(provenance.START_TIME_ENV, "12.5")
    assert provenance.start_unix_s() == 12.5
