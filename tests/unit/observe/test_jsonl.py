"""JSON that is damaged is refused with one sentence, and only a newline ends a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import numbered_lines, parse_finite_json, parse_json


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "1+1=", "answer": \n', "cut off at column 28"),
        (b'{"prompt": "1+1=", "ans\n', "cut off at column 23"),
        (b'{"prompt": "1+1="\n', "cut off at column 17"),
        (b'{"a": 1} {"b": 2}\n', "Extra data at column 10"),
        (b'{"a": tru}\n', "Expecting value at column 7"),
        (b'{\n "a": 1\n "b": 2\n}\n', "Expecting ',' delimiter at line 3, column 2"),
        (b'{\n "a": 1,\n "b": \n', "cut off at line 3, column 5"),
        (b"", "cut off at column 0"),
        (b"[" * 100_000, "it is nested too deeply"),
        (
            b"1" * 5000,
            "Exceeds the limit .4300 digits. for integer string conversion: value has 5000 digits",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_column(content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"^x.jsonl:7: not valid JSON: {said}$"):
        parse_json("x.jsonl:7", content)


def test_bytes_that_are_no_text_are_named() -> None:
    with pytest.raises(DataError, match="x.jsonl:7: not UTF-8 at byte 2"):
        parse_json("x.jsonl:7", b'"\xff"')


def test_numbers_that_are_not_finite() -> None:
    content = b"[0.5, 3, 1e999, -1e999, NaN, Infinity, 1" + b"0" * 308 + b"]"
    assert parse_finite_json("", content) == [0.5, 3, None, None, None, None, None]
    assert parse_finite_json("", b"[1e999, NaN]", replace_non_finite=str) == ["1e999", "NaN"]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    text = '"a\u2028b\u2029c\u0085d"\n\n"\x1c\x0b"\r\n"last"'
    (tmp_path / "x.jsonl").write_bytes(text.encode())
    found = [
        (number, line.decode().strip("\r\n"))
        for number, line in numbered_lines(tmp_path / "x.jsonl")
    ]
    assert found == [(1, '"a\u2028b\u2029c\u0085d"'), (3, '"\x1c\x0b"'), (4, '"last"')]
