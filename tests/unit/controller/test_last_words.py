from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.controller import last_words


def test_the_first_sentence_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "attempt_0/0"
    folder.mkdir(parents=True)
    monkeypatch.setenv(last_words.ERROR_FILE_ENV, str(folder / "error.json"))
    last_words.write("the cause")
    last_words.write("its echo")
    assert last_words.of_the_last_start(tmp_path) == ["the cause"]
    assert [path.name for path in folder.iterdir()] == ["error.json"]


def test_each_start_of_the_ranks_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (0, 9, 10):
        folder = tmp_path / f"attempt_{start}/1"
        folder.mkdir(parents=True)
        monkeypatch.setenv(last_words.ERROR_FILE_ENV, str(folder / "error.json"))
        last_words.write(f"the cause of {start}")
    assert last_words.of_the_last_start(tmp_path) == ["the cause of 10"]
    assert last_words.of_the_start_before() == "the cause of 9"
    monkeypatch.setenv(last_words.ERROR_FILE_ENV, str(tmp_path / "attempt_9/1/error.json"))
    assert "without a word" in last_words.of_the_start_before()


@pytest.mark.parametrize("folder", [None, "missing"])
def test_without_a_file_or_room_it_goes_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: str | None
) -> None:
    monkeypatch.delenv(last_words.ERROR_FILE_ENV, raising=False)
    if folder:
        monkeypatch.setenv(last_words.ERROR_FILE_ENV, str(tmp_path / folder / "error.json"))
    last_words.write("the cause")
    assert capfd.readouterr().err == "the cause\n"
