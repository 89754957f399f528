from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from spmd_rl.controller.snapshots import Snapshots
from spmd_rl.controller.stacks import POINTER, StackServer, all_stacks, ask, place_of_main_thread
from spmd_rl.controller.wire import Stacks
from spmd_rl.errors import ConfigError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A private folder, whose path is longer than the address of a socket may be, and a run's."""
    private, run = tmp_path / ("long" * 30), tmp_path / "run"
    private.mkdir()
    run.mkdir()
    return private, run


def place_seen_from_another_thread() -> str:
    places: list[str] = []
    thread = threading.Thread(target=lambda: places.append(place_of_main_thread()))
    thread.start()
    thread.join()
    return places[0]


def test_here_is_this_line() -> None:
    assert "test_here_is_this_line" in all_stacks()


def test_a_place_is_that_of_the_innermost_file_that_is_no_library() -> None:
    """While the main thread waits inside the standard library's `threading`, of all files."""
    assert place_seen_from_another_thread().startswith("test_stacks.py:")
    assert place_seen_from_another_thread().endswith(" in place_seen_from_another_thread")


def test_who_asks_is_told(folders: tuple[Path, Path]) -> None:
    private, run = folders
    with closing(StackServer(private, run, lambda: "here\n" * 100_000)):
        assert ask(run) == "here\n" * 100_000
        assert ask(run).startswith("here")
    assert not (run / POINTER).exists()
    with pytest.raises(ConfigError, match="no run is going on in"):
        ask(run)


def test_a_run_that_died_or_lives_elsewhere_is_said_so(folders: tuple[Path, Path]) -> None:
    private, run = folders
    server = StackServer(private, run, lambda: "")
    pointer = (run / POINTER).read_text()
    server.close()
    (run / POINTER).write_text(pointer)
    with pytest.raises(ConfigError, match=r"its controller \(pid \d+\) is gone"):
        ask(run)
    (run / POINTER).write_text(pointer.replace(socket.gethostname(), "elsewhere"))
    with pytest.raises(ConfigError, match="is on elsewhere: ask there"):
        ask(run)


@pytest.mark.parametrize("pointer", [b"[]", b"7", b"{}", b'{"host": "h", "pid": 1}', b'{"host": 1}', b"\xff", b"{"])
def test_a_pointer_that_is_none(tmp_path: Path, pointer: bytes) -> None:
    (tmp_path / POINTER).write_bytes(pointer)
    with pytest.raises(ConfigError, match=r"controller\.json does not say where a controller is: "):
        ask(tmp_path)


@pytest.mark.parametrize("folder", ["/", "no/where", r"\u0000", r"\ud800", ""])
def test_a_pointer_to_nowhere(tmp_path: Path, folder: str) -> None:
    (tmp_path / POINTER).write_text(f'{{"host": "{socket.gethostname()}", "pid": 1, "folder": "{folder}"}}')
    with pytest.raises(ConfigError, match=r"controller"):
        ask(tmp_path)


def test_stacks_are_saved_with_what_is_missing(tmp_path: Path) -> None:
    snapshots = Snapshots()
    snapshots.take(0, Stacks("a.py:1 in f", "thread main", {"replayed": 2}), b"{}")
    assert snapshots.has_all([0])
    assert not snapshots.has_all([0, 1])
    assert snapshots.save(tmp_path / "stacks", 2) == f"the stacks of all ranks are in {tmp_path / 'stacks'}"
    assert (tmp_path / "stacks/rank_0.txt").read_text() == "2 frames refused: replayed\nthread main"
    assert (tmp_path / "stacks/rank_0.collectives.json").read_text() == "{}"
    assert "no answer" in (tmp_path / "stacks/rank_1.txt").read_text()
    assert "in save" in (tmp_path / "stacks/controller.txt").read_text()
    assert snapshots.place(0) == "at a.py:1 in f"
    assert snapshots.place(1) == "which does not answer"


def test_a_disk_that_takes_nothing_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("in the way")
    assert "could not be saved" in Snapshots().save(tmp_path / "stacks", 1)
