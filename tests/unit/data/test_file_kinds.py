"""Kinds of data files: the records that were written, their lines, and errors that name them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.data.files import arrow_records, jsonl_records
from spmd_rl.data.files.csv_records import read_csv
from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.json_records import read_json
from spmd_rl.data.files.record import DataRecord, ListedRecords
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.jsonl import numbered_lines
from tests.unit.data.whole_files import read_records

FILE = Path("x.csv")
ROWS = [{"prompt": [{"role": "user", "content": f"{i}?"}], "level": i} for i in range(5)]
on_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def sound(records: list[DataRecord | DataError]) -> list[DataRecord]:
    """The records, none of which may be malformed."""
    return ListedRecords(records, 0, "").read(range(len(records)))


def write_dataset(
    folder: Path, rows: Sequence[dict[str, Any]], order: Sequence[int] = (), schema: Any = None
) -> Path:
    """Write what `save_to_disk` writes: two Arrow files, and their names in state.json."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir()

    def write(name: str, table: Any) -> dict[str, str]:
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
        return {"filename": name}

    table, half = pyarrow.Table.from_pylist(list(rows), schema), len(rows) // 2
    state: dict[str, Any] = {
        "_data_files": [
            write("data-0.arrow", table.slice(0, half)),
            write("data-1.arrow", table.slice(half)),
        ]
    }
    if order:
        indices = pyarrow.table({"indices": pyarrow.array(order, pyarrow.uint64())})
        state["_indices_data_files"] = [write("indices.arrow", indices)]
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@on_one_folder
@given(
    content=st.lists(st.sampled_from([b'{"a":1}', b"\n", b"\r\n", b" ", b"\t", b"\xe2\x80\xa8"])),
)
def test_lines_are_found(tmp_path: Path, content: list[bytes]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"".join(content))
    with file.open("rb") as opened:
        starts, stops, numbers = jsonl_records.index_lines(opened)
    data = file.read_bytes()
    found = [
        (int(number), data[start:stop])
        for number, start, stop in zip(numbers, starts, stops, strict=True)
    ]
    assert found == [*numbered_lines(file)]


def test_a_file_that_changes_after_its_opening_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    records = open_records(str(file))
    assert [record.row["a"] for record in records.read([1, 0])] == [2, 1]
    file.write_text('{"a": 1}\n')
    for look in (lambda: records.read([0]), records.digest):
        with pytest.raises(DataError, match=r"x\.jsonl: the file has changed since the run opened"):
            look()
    file.unlink()
    with pytest.raises(DataError, match="the file cannot be read"):
        records.read([0])


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("key", [None, "rows"])
def test_json_holds_a_list_of_objects(tmp_path: Path, indent: int | None, key: str | None) -> None:
    value = ROWS if key is None else {"version": [1][0], "about": {"rows": 2}, key: ROWS, "end": 1}
    file = tmp_path / "x.json"
    file.write_text(json.dumps(value, indent=indent))
    records = read_records(f"{file}@[1:]")
    assert [record.row for record in records] == ROWS[1:]
    lines = file.read_text().splitlines()
    for number, record in enumerate(records, start=2):
        line, _, of = record.where.removeprefix(f"{file}:").partition(", record ")
        assert int(of) == number
        assert "{" in lines[int(line) - 1]
    assert len({record.where for record in records}) == len(records)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"3", r"^x\.csv: expected a list of objects, got 3$"),
        (b'{"a": 1}\n{"a": 2}', r"^x\.csv: not valid JSON: Extra data at line 2"),
        (b'{"a": [], "b": []}', r"its lists: 'a', 'b'"),
        (b'[{"a": 1},\n\n 7]', r"^x\.csv:3, record 2: expected a JSON object, got 7$"),
        (b'[{"a": "\xff"}]', r"^x\.csv: not UTF-8 at byte 9"),
        (b"", r"^x\.csv: not valid JSON"),
    ],
)
def test_json_of_another_form_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        sound(read_json(FILE, content))


@given(st.lists(st.tuples(*[st.text(st.sampled_from('a,"\n\r é'), max_size=6)] * 2), max_size=6))
def test_csv_is_what_was_written(rows: list[tuple[str, str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("prompt", "answer"), *rows])
    content = text.getvalue().encode("utf-8-sig")
    records = sound(read_csv(FILE, content))
    assert [(r.row["prompt"], r.row["answer"]) for r in records] == rows
    lines = content.splitlines()
    for record in records:  # on the line where a record begins, its first field begins
        line = lines[int(record.where.partition(":")[2]) - 1].decode()
        first = record.row["prompt"].splitlines()[:1] or [""]
        assert line.removeprefix('"').startswith(first[0].replace('"', '""'))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'a,b\n"x\ny",2\n1,2,3\n', r"^x\.csv:4: expected 2 fields, as the header has, got 3$"),
        (b"a,b\n\n1\n", r"^x\.csv:3: expected 2 fields, as the header has, got 1$"),
        (b'a,b\n1,2\n"x,\n3\n', r"^x\.csv:3: not valid CSV"),
        (b'a,b\n1,"x"y\n', r"^x\.csv:2: not valid CSV"),
        (b"a,a\n1,2\n", r"^x\.csv:1: two columns are called 'a'$"),
        (b"a,b\n1,2\n\xff,2\n", r"^x\.csv:3: not UTF-8 at byte 1$"),
    ],
)
def test_malformed_csv_is_named_by_its_line(content: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        sound(read_csv(FILE, content))


def test_a_long_field_of_csv(tmp_path: Path) -> None:
    limit, long = csv.field_size_limit(), "x" * 200_000
    assert limit < len(long)
    (tmp_path / "x.csv").write_text(f"prompt\n{long}\n")
    assert read_records(str(tmp_path / "x.csv"))[0].row == {"prompt": long}
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("order", [[], [4, 0, 0, 3]])
def test_a_dataset_on_disk(tmp_path: Path, order: list[int]) -> None:
    folder = write_dataset(tmp_path / "chat", ROWS, order)
    expected = [ROWS[number] for number in order or range(5)]
    assert [record.row for record in read_records(str(folder))] == expected
    numbers = [3, 0, 1, 2, 2]
    found = open_records(str(folder)).read(numbers)
    assert [record.row for record in found] == [expected[number] for number in numbers]
    assert open_records(str(folder)).read([]) == []
    last = read_records(f"{folder}@[-1:]")
    assert [(r.where, r.row) for r in last] == [(f"{folder}:{len(expected)}", expected[-1])]


def test_a_dataset_of_splits_or_damaged(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="several splits: name one of .*whole/train, .*whole/test"):
        read_records(str(whole))
    folder = write_dataset(tmp_path / "ds", ROWS)
    (folder / "data-1.arrow").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"data-1\.arrow: not an Arrow file"):
        read_records(str(folder))
    for state in ('{"_data_files": [3]}', "[]", '{"_data_files": 3}'):
        (folder / "state.json").write_text(state)
        with pytest.raises(DataError, match=r"state\.json: _data_files: expected a list of files"):
            read_records(str(folder))
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match="_data_files names no file"):
        read_records(str(folder))


@pytest.mark.parametrize("in_memory", [1 << 26, 0])
def test_parquet_in_memory_and_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(arrow_records, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(arrow_records, "_BATCH", 2)
    monkeypatch.setattr(arrow_records.tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)
    records = open_records(f"{path}@[1:]")
    assert [record.row for record in records.read([3, 0, 2])] == [ROWS[4], ROWS[1], ROWS[3]]
    assert records.read([3])[0].where == f"{path}:5"
    assert [*tmp_path.iterdir()] == [path], "no temporary file is left"
    if not in_memory:
        monkeypatch.setattr(arrow_records.tempfile, "tempdir", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="unpacked into a temporary folder.*set TMPDIR"):
            open_records(str(path))
        monkeypatch.setattr(arrow_records.tempfile, "tempdir", str(tmp_path))
    content = bytearray(path.read_bytes())
    content[4:100] = bytes(96)  # the first page, which is compressed
    for broken in (content, b"PAR1"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"x\.parquet: not a parquet file"):
            open_records(str(path))


def test_digests_notice_a_changed_byte_and_another_slice(tmp_path: Path) -> None:
    for name, content in {
        "x.jsonl": '{"a": "1"}\n{"a": "1"}\n',
        "x.json": '[{"a": "1"}, {"a": "1"}]',
        "x.csv": "a\n1\n1\n",
    }.items():
        path = tmp_path / name
        path.write_text(content)
        digests = [open_records(f"{path}{cut}").digest() for cut in ("", "@[:]", "@[:1]", "@[1:]")]
        path.write_text(content.replace("1", "2"))
        digests.append(open_records(str(path)).digest())
        assert digests[0] == digests[1]
        assert len({*digests}) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl.gz", b"\x1f\x8b\x08", "the file is compressed: unpack it first"),
        ("x.jsonl", b"\x1f\x8b\x08", "the file is compressed: unpack it first"),
        ("x.csv", b"\x1f\x8b\x08", "the file is compressed: unpack it first"),
        ("x.zip", b"PK", "the file is compressed: unpack it first"),
        ("x.csv", b"a;b\n1;2\n", "the header is one column, 'a;b': separate fields by commas"),
        ("x.csv", b"a\tb\n1\t2\n", r"the header is one column, 'a\\tb': separate fields by"),
        ("x.json", b"", "the file holds no record"),
        ("x.csv", b"\n", "the file holds no record"),
        ("x.jsonl", b'[{"a": 1},\n{"a": 2}]', "a file that is one list is called .json"),
    ],
)
def test_mistakes_of_new_users(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records(str(tmp_path / name))


def test_a_csv_of_one_column(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbfprompt\r\na;b\r\n")
    (record,) = read_records(str(tmp_path / "x.csv"))
    assert record.row == {"prompt": "a;b"}
