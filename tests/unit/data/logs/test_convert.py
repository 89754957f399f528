"""Conversion of files: rejects by line, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.cli.data.command import main
from spmd_rl.cli.data.inspect import check_records, describe_file
from spmd_rl.cli.data.view import View
from spmd_rl.data.files.files import open_records
from spmd_rl.data.logs.convert import convert
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.errors import ConfigError

GOOD = json.dumps({"messages": [{"role": "user", "content": "q"}]})
BROKEN = ["{", "[]", '{"messages": []}', '{"messages": [{"role": "user", "content": 1}]}', "NaN"]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(1, 200), min_size=10, max_size=10))
def test_exactly_the_broken_lines_are_reported(
    tmp_path_factory: pytest.TempPathFactory, broken: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    lines = [BROKEN[n % len(BROKEN)] if n in broken else GOOD for n in range(1, 201)]
    result = convert(write(folder / "in.jsonl", lines), folder / "out.jsonl", None, "messages")
    assert [item.line for item in result.rejects] == sorted(broken)
    assert all(f"in.jsonl:{item.line}: " in item.reason for item in result.rejects)
    assert len((folder / "out.jsonl").read_text().splitlines()) == 190


def test_exit_codes_and_the_file_of_rejects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [GOOD, "{"])
    target, rejects = tmp_path / "out.jsonl", tmp_path / "rejects.jsonl"
    words = ["convert", str(source), str(target), "--rejects", str(rejects)]
    assert main(words) == 0
    assert json.loads(rejects.read_text())["line"] == 2
    assert "1 of 2 records" in capsys.readouterr().out
    assert main([*words, "--force", "--strict"]) == 1
    with pytest.raises(ConfigError, match="--force"):
        main(words)
    with pytest.raises(ConfigError, match="of its own"):
        main([*words[:3], "--force", "--rejects", str(source)])
    assert source.read_text() == f"{GOOD}\n{{\n"


def test_nothing_is_written_when_all_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", ["{", "{"])
    assert main(["convert", str(source), str(tmp_path / "out.jsonl"), "--from", "openai"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_json_file_is_read_as_a_list(tmp_path: Path) -> None:
    source = write(tmp_path / "in.json", [f"[{GOOD}, 3]"])
    result = convert(source, tmp_path / "out.jsonl", "openai", "gemini")
    assert [item.line for item in result.rejects] == [2]


def test_check_finds_all_problems_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"prompt": "q", "answer": 1}', "{", '{"prompt": 3, "answer": ""}', '{"prompt": "q"}']
    path = write(tmp_path / "p.jsonl", lines)
    found = check_records(open_records(str(path)), View("grpo", PromptConfig(), None, []), None)
    assert found.num_records == 4
    assert [str(line).split(":")[1] for line in found.problems] == ["2", "3", "4"]
    assert main(["check", str(path), "--show", "1"]) == 1
    assert "... and 2 more" in capsys.readouterr().out
    assert main(["check", str(write(path, lines[:1])), "--prompts.answer_key="]) == 0


def test_stats_count_fields_duplicates_and_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "p.jsonl", [GOOD, GOOD, '{"prompt": "abc", "source": "s"}', "{"])
    stats = describe_file(str(path), PromptConfig(), None)
    assert (stats["records"], stats["broken"], stats["duplicate_prompts"]) == (4, 1, 1)
    assert stats["roles"] == {"user": 2}
    assert stats["sources"] == {"s": 1}
    assert stats["lengths"]["characters"]["p100"] == 3
    assert main(["stats", str(path)]) == 0
    assert "duplicate prompts" in capsys.readouterr().out


def test_help_shows_all_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--from", "--strict", "--model", "stats"))
