from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.controller import last_words


def test_the_first_sentence_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(last_words.ERROR_FILE_ENV, str(tmp_path / "error.json"))
    last_words.write("the cause")
    last_words.write("its echo")
    assert last_words.read(tmp_path) == ["the cause"]
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("folder", [None, "missing"])
def test_without_a_file_or_room_it_goes_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: str | None
) -> None:
    monkeypatch.delenv(last_words.ERROR_FILE_ENV, raising=False)
    if folder:
        monkeypatch.setenv(last_words.ERROR_FILE_ENV, str(tmp_path / folder / "error.json"))
    last_words.write("the cause")
    assert capfd.readouterr().err == "the cause\n"
