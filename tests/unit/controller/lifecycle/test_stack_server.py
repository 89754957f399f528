"""Stack server: who may ask a live controller, and what a crafted run folder can do."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from spmd_rl.controller.lifecycle import stack_server
from spmd_rl.controller.lifecycle.stack_server import POINTER_FILE, StackServer, ask
from spmd_rl.errors import ConfigError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return a private folder with a path longer than a socket address may be, and a run folder."""
    private, run = tmp_path / ("long" * 30), tmp_path / "run"
    private.mkdir()
    run.mkdir()
    return private, run


def test_who_asks_is_told(folders: tuple[Path, Path]) -> None:
    private, run = folders
    with closing(StackServer(private, run, lambda: "here\n" * 100_000)):
        assert ask(run) == "here\n" * 100_000
        assert ask(run).startswith("here")
    assert not (run / POINTER_FILE).exists()
    with pytest.raises(ConfigError, match="no run is going on in"):
        ask(run)


def test_a_run_that_died_or_lives_elsewhere_is_said_so(folders: tuple[Path, Path]) -> None:
    private, run = folders
    server = StackServer(private, run, lambda: "")
    pointer = (run / POINTER_FILE).read_text()
    server.close()
    (run / POINTER_FILE).write_text(pointer)
    with pytest.raises(ConfigError, match=r"its controller \(pid \d+\) is gone"):
        ask(run)
    (run / POINTER_FILE).write_text(pointer.replace(socket.gethostname(), "elsewhere"))
    with pytest.raises(ConfigError, match="is on elsewhere: ask there"):
        ask(run)


@pytest.mark.parametrize(
    "pointer", [b"[]", b"7", b"{}", b'{"host": "h", "pid": 1}', b'{"host": 1}', b"\xff", b"{"]
)
def test_a_pointer_that_is_none(tmp_path: Path, pointer: bytes) -> None:
    (tmp_path / POINTER_FILE).write_bytes(pointer)
    with pytest.raises(ConfigError, match=r"controller\.json does not say where a controller is: "):
        ask(tmp_path)


@pytest.mark.parametrize("folder", ["/", "no/where", r"\u0000", r"\ud800", ""])
def test_a_pointer_to_nowhere(tmp_path: Path, folder: str) -> None:
    (tmp_path / POINTER_FILE).write_text(
        f'{{"host": "{socket.gethostname()}", "pid": 1, "folder": "{folder}"}}'
    )
    with pytest.raises(ConfigError, match=r"controller"):
        ask(tmp_path)


def listen(folder: Path, run: Path, answer: bytes) -> socket.socket:
    """Pretend to be a controller, and send `answer` to the first client."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/stacks")
    listener.listen()
    (run / POINTER_FILE).write_text(
        f'{{"host": "{socket.gethostname()}", "pid": 1, "folder": "{folder}"}}'
    )

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as line:
            line.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_a_controller_of_another_user_is_not_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen(tmp_path, tmp_path, b"stacks"):
        us = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: us + 1)
        with pytest.raises(ConfigError, match=rf"belongs to another user \(uid {us}\)"):
            ask(tmp_path)


def test_an_answer_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_server, "MAX_ANSWER_BYTES", 1 << 20)
    with listen(tmp_path, tmp_path, b"x" * (1 << 24)):
        assert 1 << 20 <= len(ask(tmp_path)) < 1 << 21


def test_a_drop_at_a_time_does_not_hold_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_server, "ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/stacks")
        listener.listen()
        (tmp_path / POINTER_FILE).write_text(
            f'{{"host": "{socket.gethostname()}", "pid": 1, "folder": "{tmp_path}"}}'
        )

        def drip() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as line:
                while True:
                    line.sendall(b"x")
                    threading.Event().wait(0.05)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(ConfigError, match=r"did not answer in 0\.2 s"):
            ask(tmp_path)


def test_no_answer_commands_the_terminal(tmp_path: Path) -> None:
    with listen(tmp_path, tmp_path, "\x1b]0;t\x07\tHé\r\x9b2J\nnext\xff".encode() + b"\xff"):
        assert ask(tmp_path) == "\\x1b]0;t\\x07\tHé\\r\\x9b2J\nnextÿ\\xff"


def test_a_pointer_that_is_a_pipe_a_link_or_endless(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / POINTER_FILE)
    with pytest.raises(ConfigError, match="no run is going on in"):
        ask(tmp_path)
    (tmp_path / POINTER_FILE).unlink()
    (tmp_path / POINTER_FILE).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no run is going on in"):
        ask(tmp_path)
    (tmp_path / POINTER_FILE).unlink()
    with (tmp_path / POINTER_FILE).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="does not say where a controller is"):
        ask(tmp_path)
