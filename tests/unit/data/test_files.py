"""Data files: slices as in Python, and errors that name file, line and field."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_rl.data.files.record import DataRecord
from spmd_rl.errors import ConfigError, DataError
from tests.unit.data.whole_files import read_records

Jsonl = Callable[..., str]
LINES = [f'{{"prompt": "{i}"}}' for i in range(6)]


@pytest.mark.parametrize("cut", ["0:2", "2:", ":-1", "-2:", ":", "1:5", "-4:-2"])
def test_a_slice_is_pythons(jsonl: Jsonl, cut: str) -> None:
    start, stop = (int(part) if part else None for part in cut.split(":"))
    got = [record.text("prompt") for record in read_records(jsonl(*LINES) + f"@[{cut}]")]
    assert got == ["0", "1", "2", "3", "4", "5"][start:stop]


def test_a_record_knows_its_line_though_lines_are_blank(jsonl: Jsonl) -> None:
    records = read_records(jsonl(LINES[0], "", LINES[1]))
    assert [record.where.rpartition(":")[2] for record in records] == ["1", "3"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', r"train\.jsonl:2: not valid JSON"),
        ("[1]", r"train\.jsonl:2: expected a JSON object, got \[1\]"),
        ('{"id": ' + "1" * 5000 + "}", r"train\.jsonl:2: not valid JSON: Exceeds the limit"),
        ("[" * 100_000, r"train\.jsonl:2: not valid JSON"),
    ],
)
def test_a_malformed_line_is_named(jsonl: Jsonl, line: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_records(jsonl(LINES[0], line))


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: not UTF-8"):
        read_records(str(path))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf16_is_told_at_its_first_line(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}', encoding=encoding)
    with pytest.raises(DataError, match=r"x\.jsonl:1: not (UTF-8 at byte 1|valid JSON)"):
        read_records(str(path))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\r\n{"a": 2}\r\n', encoding="utf-8-sig")
    assert [record.row for record in read_records(str(path))] == [{"a": 1}, {"a": 2}]


def test_missing_empty_or_unknown_files(jsonl: Jsonl, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_records(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="holds no record"):
        read_records(jsonl(""))
    with pytest.raises(DataError, match="slice is empty: the file holds 6 records"):
        read_records(jsonl(*LINES) + "@[6:]")
    with pytest.raises(
        ConfigError, match=r"data files end in \.jsonl, \.json, \.traj, .* or \.parquet"
    ):
        read_records(jsonl("x", name="train.txt"))
    with pytest.raises(ConfigError, match="write a slice as"):
        read_records(jsonl(*LINES) + "@[1]")


def test_fields_are_checked() -> None:
    record = DataRecord(
        "f.jsonl:3", {"a": "x", "n": 4, "b": True, "l": [], "f": 2.5, "i": math.inf}
    )
    assert [record.text_or_number(key) for key in ("a", "n", "f")] == ["x", "4", "2.5"]
    assert record.text("a") == "x"
    with pytest.raises(
        DataError,
        match="f.jsonl:3: z: no such key in this record \\(it has 'a', 'n', 'b', 'l', 'f', 'i'\\)",
    ):
        record.text("z")
    for key in ("b", "l", "n", "f"):
        with pytest.raises(DataError, match=f"f.jsonl:3: {key}: expected a string, got "):
            record.text(key)
    for key in ("b", "l", "i"):
        with pytest.raises(
            DataError, match=f"f.jsonl:3: {key}: expected a string or a finite number, got "
        ):
            record.text_or_number(key)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    assert [record.text("prompt") for record in read_records(str(path))] == ["a", "b"]


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ConfigError, match=r"needs pyarrow: pip install -e '.\[data\]' in its repository"
    ):
        read_records(str(tmp_path / "x.parquet"))


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="this is a folder, not a file .* save_to_disk$"):
        read_records(str(tmp_path))
    (tmp_path / "main").mkdir()
    (tmp_path / "main/train.parquet").touch()
    with pytest.raises(DataError, match=r"name a file in it, such as .*main/train\.parquet$"):
        read_records(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("openai/gsm8k", "openai/gsm8k"),
        ("openai/gsm8k@[:100]", "openai/gsm8k"),
        ("some-one/Math_v1.1", "some-one/Math_v1.1"),
        ("hf://datasets/openai/gsm8k/main/train.parquet", "openai/gsm8k"),
        ("https://huggingface.co/datasets/openai/gsm8k", "openai/gsm8k"),
        ("data/train.jsonl", None),
        ("/data/train", None),
        ("a/b/c", None),
        ("../a/b", None),
    ],
)
def test_a_name_of_the_hub_is_told_how_it_comes_to_disk(path: str, name: str | None) -> None:
    with pytest.raises(DataError, match="no such file") as raised:
        read_records(path)
    hint = f"`hf download --repo-type dataset {name} --local-dir {Path(name or '').name}`"
    assert (hint in str(raised.value)) == (name is not None)
    assert ("hf download" in str(raised.value)) == (name is not None)
