from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.observe.atomic_write import atomic_file, open_append, write_atomically


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with atomic_file(path) as file:
        file.write(b"af")
        file.flush()
        assert path.read_text() == "before"
        file.write(b"ter")
    assert path.read_text() == "after"
    assert [*tmp_path.iterdir()] == [path]


def test_what_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    def begin() -> None:
        with atomic_file(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        begin()
    assert not [*tmp_path.iterdir()]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "file"
    with pytest.raises(FileNotFoundError) as told:
        write_atomically(path, "text")
    assert told.value.filename == str(path)


def test_no_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious, path = tmp_path / "precious", tmp_path / "file"
    precious.write_text("kept")
    path.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        open_append(path)
    write_atomically(path, "text")
    assert (precious.read_text(), path.read_text(), path.is_symlink()) == ("kept", "text", False)
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / "file.guessed.part").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_atomically(path, "other")
    assert precious.read_text() == "kept"
