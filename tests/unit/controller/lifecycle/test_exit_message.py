"""Exit messages: where a process leaves the sentence that says why it ends, and who reads it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.cli import launcher
from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.controller.run.controller_main import explain
from spmd_rl.errors import DiskError, SpmdError
from tests.control_texts import COMMANDS, is_harmless


def test_the_first_sentence_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "attempt_0/0"
    folder.mkdir(parents=True)
    monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(folder / "error.json"))
    exit_message.write("the cause")
    exit_message.write("its echo")
    assert exit_message.read_last_start(tmp_path) == ["the cause"]
    assert [path.name for path in folder.iterdir()] == ["error.json"]


def test_words_that_come_when_torchrun_is_gone_are_no_second_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(
        exit_message.ERROR_FILE_ENV, str(tmp_path / "removed/attempt_0/0/error.json")
    )
    exit_message.write("the cause, again")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("launcher", ["spmd-rl", "torchrun"])
def test_where_no_rank_is_left_only_a_plain_torchrun_needs_the_words_on_stderr(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    launcher: str,
) -> None:
    (tmp_path / "attempt_0").mkdir()
    monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(tmp_path / "attempt_0/error.json"))
    monkeypatch.delenv(exit_message.LAUNCHER_ENV, raising=False)
    if launcher == "spmd-rl":
        monkeypatch.setenv(exit_message.LAUNCHER_ENV, "1")
    exit_message.write_for_all_ranks("the cause")
    assert exit_message.read_last_start(tmp_path) == ["the cause"]
    assert capfd.readouterr().err == ("" if launcher == "spmd-rl" else "the cause\n")


def test_a_record_that_torch_wrote_is_a_sentence_too(tmp_path: Path) -> None:
    (tmp_path / "attempt_0/0").mkdir(parents=True)
    record = {"message": {"message": "KeyError: 'x'", "extraInfo": {}}}
    (tmp_path / "attempt_0/0/error.json").write_text(json.dumps(record))
    assert exit_message.read_last_start(tmp_path) == ["KeyError: 'x'"]


@pytest.mark.parametrize(("parent", "is_read"), [("alive", True), ("ending", False), ("", False)])
def test_words_that_no_launcher_will_read_go_to_stderr_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    parent: str,
    is_read: bool,
) -> None:
    (tmp_path / "attempt_0").mkdir()
    monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(tmp_path / "attempt_0/error.json"))
    monkeypatch.setattr(exit_message, "_launcher_pids", [os.getppid() if parent else -1])
    monkeypatch.setattr(exit_message, "is_ending", lambda pid: parent == "ending")
    exit_message.write("the cause")
    assert exit_message.read_last_start(tmp_path) == ["the cause"]
    assert capfd.readouterr().err == ("" if is_read else "the cause\n")


def test_each_start_of_the_ranks_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in (0, 9, 10):
        folder = tmp_path / f"attempt_{start}/1"
        folder.mkdir(parents=True)
        monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(folder / "error.json"))
        exit_message.write(f"the cause of {start}")
    assert exit_message.read_last_start(tmp_path) == ["the cause of 10"]
    assert exit_message.reason_of_restart() == "the cause of 9"
    monkeypatch.setattr(exit_message, "WAIT_S", 0.1)
    monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(tmp_path / "attempt_9/1/error.json"))
    assert "left no message" in exit_message.reason_of_restart()


def test_they_are_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(exit_message.ERROR_FILE_ENV, raising=False)
    exit_message.write("rank 0: RuntimeError: no such shape\n\nException raised from here\n")
    assert (
        capfd.readouterr().err
        == "rank 0: RuntimeError: no such shape; Exception raised from here\n"
    )


FORKED = """
import os
from spmd_rl.controller.lifecycle import exit_message
exit_message.disown_children()
if child := os.fork():
    os.waitpid(child, 0)
exit_message.write("of the rank" if child else "of the child")
"""
LEFT = """
import multiprocessing, threading, time
from spmd_rl.controller.lifecycle import shutdown
shutdown.EXIT_S = 0.2
threading.Thread(target=time.sleep, args=(1500,), name="judge").start()
multiprocessing.get_context("fork").Process(target=time.sleep, args=(1500,), name="pool").start()
raise SystemExit(shutdown.limit_exit("rank 0", 7))
"""


def test_what_a_rank_forked_has_no_say(tmp_path: Path) -> None:
    folder = tmp_path / "attempt_0/0"
    folder.mkdir(parents=True)
    ended = _python(FORKED, **{exit_message.ERROR_FILE_ENV: str(folder / "error.json")})
    assert (ended.returncode, ended.stderr) == (0, "of the child\n")
    assert exit_message.read_last_start(tmp_path) == ["of the rank"]


def test_nothing_that_user_code_left_running_holds_a_process() -> None:
    ended = _python(LEFT)
    assert ended.stderr == "rank 0 has ended without what still ran in it: judge, pool\n"
    assert ended.returncode == 7


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize("full", [False, True])
def test_without_a_file_or_room_it_goes_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], full: bool
) -> None:
    def write_text(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.delenv(exit_message.ERROR_FILE_ENV, raising=False)
    if full:
        monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(tmp_path / "error.json"))
        monkeypatch.setattr(Path, "write_text", write_text)
    exit_message.write("the cause")
    assert capfd.readouterr().err == "the cause\n"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            "lost rank 1 (host h, pid 12), between calls",
            "lost rank 1 (host h, pid 12), between calls; rank 1 was killed by SIGKILL",
        ),
        (
            "lost rank 1 before it had reported to the controller",
            "lost rank 1 before it had reported to the controller; rank 1 was killed by SIGKILL",
        ),
        (
            "lost rank 12 before it had reported to the controller",
            "lost rank 12 before it had reported to the controller",
        ),
        (
            "lost rank 2 (host h, pid 13), between calls",
            "lost rank 2 (host h, pid 13), between calls",
        ),
        ("", "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_launcher_knows_what_killed_a_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    left: str,
    said: str,
) -> None:
    folder = tmp_path / "attempt_0/0"
    folder.mkdir(parents=True)
    monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(folder / "error.json"))
    if left:
        exit_message.write(left)
    launcher._print_exit_message(tmp_path, "rank 1 was killed by SIGKILL", first_failed=1)
    assert capfd.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(
    ("raised", "sentence", "traced", "kind"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/r/config.toml"),
            "runs/r/config.toml: No space left on device",
            False,
            DiskError,
        ),
        (
            OSError(errno.EACCES, "Permission denied", "runs/r"),
            "runs/r: Permission denied",
            False,
            SpmdError,
        ),
        (KeyError("x"), "test_exit_message.py:", True, SpmdError),
    ],
)
def test_what_the_system_says_needs_no_traceback(
    raised: Exception,
    sentence: str,
    traced: bool,
    kind: type[SpmdError],
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(type(raised)) as caught:
        raise raised
    explained = explain(caught.value, verbose=False)
    assert type(explained) is kind
    assert str(explained).startswith(sentence)
    assert ("Traceback" in capfd.readouterr().err) == traced


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_message_does_not_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.delenv(exit_message.ERROR_FILE_ENV, raising=False)
    exit_message.write(f"the grader said {command}")
    exit_message.write_for_all_ranks(f"the grader said {command}")
    assert is_harmless(capsys.readouterr().err)
