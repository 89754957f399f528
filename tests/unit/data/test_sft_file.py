"""File of supervised data: no line twice and none missing, wherever a run was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd_rl.data.sft_file import SftFile
from spmd_rl.errors import DataError

STEPS = [
    [{"prompt": "a", "answer": "é"}, {"prompt": "a", "answer": "2"}],
    [],
    [{"prompt": "b", "answer": "2"}, {"prompt": "a", "answer": "2"}],
    [{"prompt": "c", "answer": "3"}],
]


def write(file: SftFile, steps: list[list[dict[str, str]]]) -> bytes:
    for step in steps:
        file.add(step)
    return file.path.read_bytes()


def test_equal_answers_are_written_once(tmp_path: Path) -> None:
    file = SftFile(tmp_path / "sft.jsonl")
    lines = write(file, STEPS).decode().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["é", "2", "2", "3"]
    assert (file.num_records, file.num_duplicates) == (4, 1)


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("ours")
    (tmp_path / "sft.jsonl").symlink_to(tmp_path / "ours")
    with pytest.raises(OSError, match="symbolic links"):
        SftFile(tmp_path / "sft.jsonl").add(STEPS[0])
    assert (tmp_path / "ours").read_text() == "ours"


@pytest.mark.parametrize("line", ["", "{", "[]", "3", "\0", '{"prompt": "a"}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(DataError, match=r"sft.jsonl:2"):
        SftFile(path).restore({"bytes": path.stat().st_size, "duplicates": 0})


@pytest.mark.parametrize("saved", [0, 1, 2, 3])
@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_killed_run_continues_exactly(tmp_path: Path, saved: int, later: int) -> None:
    whole = write(SftFile(tmp_path / "whole.jsonl"), STEPS)
    path = tmp_path / "sft.jsonl"
    killed = SftFile(path)
    write(killed, [*STEPS[:saved], []])
    state = json.loads(json.dumps(killed.state()))
    write(killed, [*STEPS[saved : saved + later], []])
    with path.open("ab") as torn:
        torn.write(b'{"prompt": "torn')
    resumed = SftFile(path)
    if saved:  # else there is no checkpoint
        resumed.restore(state)
    assert write(resumed, STEPS[saved:]) == whole
    assert (resumed.num_records, resumed.num_duplicates) == (4, 1)


def test_a_shorter_file_is_refused(tmp_path: Path) -> None:
    file = SftFile(tmp_path / "sft.jsonl")
    write(file, STEPS)
    state = file.state()
    file.path.write_bytes(b"")
    with pytest.raises(DataError, match="0 bytes, but .* at the checkpoint"):
        SftFile(file.path).restore(state)
