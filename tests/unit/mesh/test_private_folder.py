"""Private folders: who may enter them, and when they are removed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.mesh import private_folder
from spmd_rl.mesh.private_folder import PREFIX, PrivateFolder, meeting_folder, sweep

ENTER = """
import sys
from spmd_rl.mesh.private_folder import PrivateFolder
print(PrivateFolder(sys.argv[1]).path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    private_folder._meeting_folder.cache_clear()
    return tmp_path / "tmp"


def in_another_process(name: str) -> subprocess.Popen[str]:
    """A process that has entered the folder, and stays there until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENTER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip().endswith(name)
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("runtime", "parent"), [("here", "here"), ("of/another/host", "tmp"), ("", "tmp")]
)
def test_it_is_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, parent: str
) -> None:
    """A batch system hands on the variables of the host that the job was submitted from."""
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime) if runtime else "")
    folder = PrivateFolder()
    assert folder.path.parent == tmp_path / parent
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.leave()


def test_the_last_process_to_leave_removes_it(temporary: Path) -> None:
    other = in_another_process("shared")
    with PrivateFolder("shared") as path:
        (path / "file").write_text("used by both")
    assert (path / "file").exists(), "the other process still uses it"
    kill(other)
    with PrivateFolder("shared"):
        pass
    assert not path.exists()


def test_only_what_the_dead_left_is_swept(temporary: Path) -> None:
    dead, alive = in_another_process("dead"), in_another_process("alive")
    kill(dead)
    (temporary / "spmd_rl-other").mkdir()
    sweep()
    assert sorted(path.name for path in temporary.iterdir()) == ["spmd_rl-other", f"{PREFIX}alive"]
    kill(alive)


def test_a_folder_that_was_made_anew_meanwhile_is_not_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweeps open what a process has just made. One removes it, and the process makes another
    before the second sweep gets the lock of the first.
    """
    path = temporary / f"{PREFIX}name"
    path.mkdir(0o700)
    again: list[PrivateFolder] = []
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not again:
            path.rmdir()
            monkeypatch.setattr(fcntl, "flock", lock)
            again.append(PrivateFolder("name"))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    sweep()
    assert path.is_dir()
    again[0].leave()
    assert not path.exists()


def test_a_sweep_follows_no_link(temporary: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    (temporary / f"{PREFIX}link").symlink_to(mine)
    inside = temporary / f"{PREFIX}inside"
    inside.mkdir()
    (inside / "link").symlink_to(mine)
    sweep()
    assert not inside.exists()
    assert (mine / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_neither_entered_nor_swept(temporary: Path) -> None:
    planted = temporary / f"{PREFIX}name"
    planted.mkdir(0o700)
    os.chown(planted, 12345, 12345)
    with pytest.raises(ConfigError, match="not this user's alone"):
        PrivateFolder("name")
    sweep()
    assert planted.exists()


def test_what_others_planted_is_not_entered(temporary: Path, tmp_path: Path) -> None:
    (temporary / f"{PREFIX}link").symlink_to(tmp_path)
    (temporary / f"{PREFIX}open").mkdir(0o755)
    (temporary / f"{PREFIX}file").touch()
    for name in ("link", "open", "file"):
        with pytest.raises(ConfigError, match="cannot be used as the run's private folder"):
            PrivateFolder(name)


def test_ranks_of_one_start_meet_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for start in ("a/attempt_0", "a/attempt_1", "b/attempt_0"):
        for rank in range(2):
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/logs/{start}/{rank}/error.json")
            found[start, rank] = meeting_folder().path
    assert all(found[start, 0] == found[start, 1] for start, _ in found)
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("file", [None, "/dev/null"])
def test_without_torchruns_log_folder_there_is_no_meeting(
    monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if file:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
    with pytest.raises(ConfigError, match="--log-dir"):
        meeting_folder()
