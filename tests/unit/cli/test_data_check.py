"""`spmd-rl data check`: as which recipe a file is read, and what each of them would refuse."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.cli.data.command import main
from spmd_rl.cli.data.view import view_of
from spmd_rl.cli.main import main as cli_main
from spmd_rl.data.files import record
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.pairs import PairConfig
from spmd_rl.errors import ConfigError, DataError
from tests.control_texts import COMMANDS, is_harmless

MODEL = Path(__file__).parents[3] / "examples/arithmetic/model"
CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c | tojson }}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# it shows thoughts of the last turn alone, so that earlier turns are rewritten
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    said = zip(roles, contents, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in said], **fields}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose tokenizer has a chat template with tools."""
    return with_template(tmp_path / "model", CHATML)


def with_template(folder: Path, template: str) -> Path:
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


@pytest.mark.parametrize(
    ("row", "settings", "recipe", "deduced"),
    [
        ({"prompt": "q", "answer": "a"}, [], "grpo", []),
        ({"prompt": [{"role": "user", "content": "q"}]}, [], "grpo", ["chat_template=true"]),
        (chat("q"), [], "grpo", ["prompt_key=messages", "chat_template=true"]),
        (
            chat("q", "a"),
            [],
            "sft",
            ["prompt_key=messages", "chat_template=true", "answer_key="],
        ),
        (chat("q", "a"), ["chat_template=true"], "sft", ["prompt_key=messages", "answer_key="]),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, [], "dpo", []),
        ({"prompt": "q", "chosen": [{}], "rejected": "b"}, [], "dpo", []),
        ({"prompt": "q", "chosen": [{}, {}], "rejected": "b"}, [], "dpo", ["chat_template=true"]),
        (
            {"q": "q", "good": "a", "bad": "b"},
            ["prompt_key=q", "chosen_key=good", "rejected_key=bad"],
            "dpo",
            [],
        ),
        (None, [], "grpo", []),
    ],
)
def test_the_first_record_tells_the_recipe(
    row: Any, settings: list[str], recipe: str, deduced: list[str]
) -> None:
    view = view_of(None, settings, None, row and DataRecord("f:1", row))
    assert (view.recipe, view.deduced) == (recipe, deduced)
    assert isinstance(view.cfg, PairConfig) == (recipe == "dpo")
    assert view.learn == ("all" if recipe == "sft" else None)


def test_a_named_recipe_is_taken_as_it_is() -> None:
    view = view_of("reward_model", [], None, DataRecord("f:1", chat("q", "a")))
    assert (view.recipe, view.cfg, view.deduced) == ("reward_model", PairConfig(), [])
    assert view_of(None, [], "last", None).recipe == "sft"
    with pytest.raises(ConfigError, match="--learn is a setting of sft"):
        view_of("dpo", [], "last", None)


def test_conversations_with_tools_and_weights(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called = chat("q", "", "7", "It is 7.", tools=TOOLS)
    called["messages"][1]["tool_calls"] = [CALL]
    not_json = json.loads(json.dumps(called).replace('{\\"a\\": 1}', "a=1"))
    weighted, unlearned = chat("q", "a"), chat("q", "a")
    weighted["messages"][1]["weight"] = 2
    unlearned["messages"][1]["weight"] = 0
    long = chat("q", "1" * 5000)
    path = write(tmp_path / "c.jsonl", called, not_json, weighted, unlearned, long, chat("q", "a"))
    assert main(["check", path, "--model", str(model)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{path} is checked as sft reads it"
    numbers = [line.split(":")[1] for line in shown if line.startswith(f"{path}:")]
    assert [number for number in numbers if number.isdigit()] == ["2", "3", "4", "5"]
    parts = (
        "tool_calls[0].function.arguments: this text is not JSON",
        "expected 0 or 1",
        "weight 0",
        "the model's context is",
    )
    assert all(part in line for line, part in zip(shown[2:], parts, strict=False))
    assert shown[-1] == "6 records, 4 problems"


def test_a_template_that_ignores_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = with_template(tmp_path / "plain", REWRITING)
    path = write(tmp_path / "c.jsonl", chat("q", "a", tools=TOOLS))
    assert main(["check", path, "--model", str(plain)]) == 1
    assert "this model's chat template ignores the tools" in capsys.readouterr().out


def test_siblings_and_dropped_conversations_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(with_template(tmp_path / "rewriting", REWRITING))
    two_turns, long = chat("1", "2", "3", "4"), chat("1" * 60, "2")
    path = write(tmp_path / "c.jsonl", two_turns, chat("1", "2"), two_turns, long)
    assert main(["check", path, "--model", folder, "--prompts.max_prompt_tokens=55"]) == 0
    shown = capsys.readouterr().out
    assert "So 2 of 3 conversations become 4 sequences." in shown
    assert "1 records have more than 55 tokens before an answer: the run leaves them out" in shown
    assert main(["check", path, "--model", folder, "--learn", "last"]) == 0
    assert "sequences" not in capsys.readouterr().out


def test_preference_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"prompt": "1", "chosen": "2", "rejected": [{"role": "assistant", "content": "3"}]}
    path = write(
        tmp_path / "p.jsonl",
        good,
        good | {"rejected": None},
        good | {"chosen": [{"role": "user", "content": "3"}]},
        {"prompt": "1", "chosen": "2"},
        good | {"chosen": "1" * 5000},
    )
    assert main(["check", path, "--model", str(MODEL), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["recipe"], found["records"]) == ("dpo", 5)
    assert [line.split(":")[1] for line in found["problems"]] == ["2", "3", "4", "5"]
    assert main(["check", f"{path}@[:1]", "--recipe", "reward_model"]) == 0
    assert "checked as reward_model reads it" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_every_problem_of_a_large_file_by_its_line(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(record, "_CHUNK", 4)
    broken = {3, 9, 10, 17}
    path = tmp_path / f"p{suffix}"
    if suffix == ".csv":
        rows = ["1" if n in broken else "1,2" for n in range(2, 22)]
        path.write_text("\r\n".join(["\ufeffprompt,answer", *rows]), encoding="utf-8")
    else:
        rows = ["3" if n in broken else '{"prompt": "1", "answer": "2"}' for n in range(1, 21)]
        joined = "\n".join(rows) if suffix == ".jsonl" else "[" + ",\n".join(rows) + "]"
        path.write_text(joined)
    assert main(["check", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    lines = [int(line.split(":")[1].split(",")[0]) for line in found["problems"]]
    assert (found["records"], lines) == (20, sorted(broken))
    first = 2 if suffix == ".csv" else 1  # a header is no record
    assert main(["check", f"{path}@[{8 - first}:{10 - first}]", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["records"], len(found["problems"])) == (2, 1)


@pytest.mark.parametrize(
    ("row", "settings", "line"),
    [
        (
            {"prompt": "q", "label": "a"},
            [],
            "50 of 50 records lack 'answer'; they have 'label': give --prompts.answer_key=label",
        ),
        (
            {"prompt": "q", "id": 3, "solution": "a"},
            [],
            "50 of 50 records lack 'answer'; they have 'id', 'solution': give "
            "--prompts.answer_key=solution",
        ),
        (
            {"prompt": "q", "x": "1", "y": "2"},
            [],
            "50 of 50 records lack 'answer'; they have 'x', 'y': give --prompts.answer_key=KEY",
        ),
        (
            {"prompt": "q", "reward_model": {"ground_truth": "a", "style": "rule"}},
            [],
            "50 of 50 records lack 'answer'; they have 'reward_model.ground_truth', "
            "'reward_model.style': give --prompts.answer_key=reward_model.ground_truth",
        ),
        (
            {"question": "q", "answer": "a"},
            [],
            "50 of 50 records lack 'prompt'; they have 'question': give "
            "--prompts.prompt_key=question",
        ),
        (
            {"prompt": "q", "answer": "a"},
            ["--prompts.answer_key=gold"],
            "50 of 50 records lack 'gold'; they have 'answer': give --prompts.answer_key=answer",
        ),
        ({"prompt": "q"}, [], "50 of 50 records lack 'answer': give --prompts.answer_key=KEY"),
        (
            {"prompt": "q", "answer": [1]},
            [],
            "PATH:1: answer: expected a string or a finite number, got [1] (so it is with 50 of 50 "
            "records)",
        ),
    ],
)
def test_what_all_records_lack_is_said_once(
    row: Any, settings: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "p.jsonl", *[row] * 50)
    assert main(["check", path, *settings]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[1:-2] == [line.replace("PATH", path)]
    assert shown[-1] == "50 records, 50 problems"
    assert main(["check", path, "--json", *settings]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 50


def test_problems_beyond_those_shown_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "q"}] * 4 + [{"prompt": 3, "answer": ""}] * 2
    assert main(["check", write(tmp_path / "p.jsonl", *rows), "--show", "1"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("4 of 6 records lack 'answer'")
    assert (shown[2], shown[-1]) == ("... and 2 more", "6 records, 6 problems")
    assert main(["check", str(tmp_path / "p.jsonl")]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0][-2:] for line in shown[2:4]] == [":5", ":6"], "a few by their lines"


def test_a_model_without_a_row_for_each_token(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "1", "answer": "2"})
    assert main(["check", path, "--model", str(model)]) == 0
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 90}))
    with pytest.raises(ConfigError, match="ids up to 97, .* has a vocab_size of 90"):
        main(["check", path, "--model", str(model)])


def test_what_a_user_may_not_expect_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template without a generation prompt where it writes a role, and empty turns."""
    without = CHATML.replace("{% if add_generation_prompt %}<assistant>{% endif %}", "")
    bare = str(with_template(tmp_path / "bare", without))
    path = write(tmp_path / "c.jsonl", chat("q", ""), chat("q", "a"))
    assert main(["check", path, "--model", bare]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2:-1] == [
        "this model's chat template has no generation prompt: the model itself must write "
        "'<assistant>' before each answer",
        "1 of 2 assistant messages are empty: the model learns to end at once there",
    ]
    answers = CHATML.replace("<{{ m.role }}>", "{% if m.role == 'user' %}[]{% endif %}").replace(
        "{% if add_generation_prompt %}<assistant>{% endif %}", ""
    )
    plain = str(with_template(tmp_path / "answers", answers))
    assert main(["check", path, "--model", plain, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) == 1, "an answer that follows the prompt needs no generation prompt"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps(chat("q", "a")["messages"])},
        {"messages": json.dumps(chat("q")["messages"])},
        {"prompt": json.dumps(chat("q")["messages"])},
    ],
)
def test_messages_as_text_are_seen_as_messages(row: Any) -> None:
    listed = {key: json.loads(text) for key, text in row.items()}
    views = [view_of(None, [], None, DataRecord("f:1", one)) for one in (row, listed)]
    assert views[0] == views[1]


def test_what_cannot_be_checked_at_all(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "1", "answer": "2"})
    with pytest.raises(DataError, match="the slice is empty"):
        main(["check", f"{path}@[5:]"])
    with pytest.raises(DataError, match="no such file"):
        main(["check", str(tmp_path / "no.csv")])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="the file holds no record"):
        main(["check", str(tmp_path / "empty.jsonl")])


def test_a_record_whose_reward_has_another_form(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "1", "answer": "2", "grader": 3})
    assert main(["check", path]) == 0
    assert main(["check", path, "--prompts.reward_key=grader"]) == 1
    assert "p.jsonl:1: grader: expected the name of a reward function" in capsys.readouterr().out


def test_logs_are_to_be_converted(tmp_path: Path, capsys: Any) -> None:
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    path = write(tmp_path / "p.jsonl", {"conversations": said})
    assert main(["check", path]) == 1
    assert f"`spmd-rl data convert {path} OUT` makes messages of sharegpt logs" in (
        capsys.readouterr().out
    )
    assert main(["convert", path, str(tmp_path / "out.jsonl")]) == 0
    assert main(["check", str(tmp_path / "out.jsonl")]) == 0


def test_stats_of_a_slice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": str(n), "answer": "2"} for n in range(9)))
    assert main(["stats", f"{path}@[2:5]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 3


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_strangers_file_does_not_command_the_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": [command], command: command, "answer": command}, {command: 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in (["check", str(path)], ["stats", str(path)]):
        monkeypatch.setattr(sys, "argv", ["spmd-rl", "data", *words])
        cli_main()
    shown = capsys.readouterr()
    assert is_harmless(shown.out + shown.err)
