"""Rows of other programs: the reply is in what is read, or a sentence says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.cli.data.command import main
from spmd_rl.data.logs.convert import convert
from spmd_rl.data.logs.formats import FORMATS, deduce, export_row, import_row
from spmd_rl.errors import ConfigError, DataError
from tests.unit.data.whole_files import read_records

USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CHOICES = {"id": "r", "choices": [{"index": 0, "message": SAID, "finish_reason": "stop"}]}
FUNCTION = {"name": "f", "arguments": {"x": 1}}
CALLED = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}],
    },
    {"role": "tool", "content": "7", "tool_call_id": "c1"},
    SAID,
]


def lc(name: str, **fields: Any) -> dict[str, Any]:
    """A message as LangChain writes it."""
    path = ["langchain", "schema", "messages", name]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": fields}


LC_CALL = {"name": "f", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
WIRE_CALL = {"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}
TRAJECTORY = [
    USER | {"agent": "main", "message_type": "observation"},
    {
        "role": "assistant",
        "content": "",
        "thought": "",
        "action": "f",
        "agent": "main",
        "tool_calls": [WIRE_CALL],
        "message_type": "action",
    },
    {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_ids": ["c1"]},
    SAID | {"tool_calls": None},
]
# format, row, and the messages that are read
READ: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "alpaca": (
        "alpaca",
        {"instruction": "do", "input": "this", "output": "a"},
        [{"role": "user", "content": "do\nthis"}, SAID],
    ),
    "alpaca without input": (
        "alpaca",
        {"instruction": "q", "input": "", "output": "a"},
        [USER, SAID],
    ),
    "alpaca with more": (
        "alpaca",
        {
            "instruction": "q",
            "output": "a",
            "input": None,
            "system": "s",
            "history": [["h", "i"]],
        },
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "h"},
            {"role": "assistant", "content": "i"},
            USER,
            SAID,
        ],
    ),
    "dolly": (
        "alpaca",
        {"instruction": "do", "context": "this", "response": "a", "category": "c"},
        [{"role": "user", "content": "do\nthis"}, SAID],
    ),
    "texts": ("raw", {"prompt": "q", "completion": "a"}, [USER, SAID]),
    "messages of trl": (
        "trl",
        {"prompt": [USER, CALLED[1], CALLED[2]], "completion": [SAID | {"weight": 1}], "tools": []},
        [*CALLED[:3], SAID | {"weight": 1}],
    ),
    "langfuse messages": ("langfuse", {"id": "o", "input": [USER], "output": SAID}, [USER, SAID]),
    "langfuse object": (
        "langfuse",
        {"input": {"messages": [USER], "tools": []}, "output": CHOICES},
        [USER, SAID],
    ),
    "langfuse texts": ("langfuse", {"input": "q", "output": "a"}, [USER, SAID]),
    "langfuse of a table": (
        "langfuse",
        {"input": json.dumps([USER]), "output": json.dumps(SAID), "name": "n"},
        [USER, SAID],
    ),
    "langfuse without a role": (
        "langfuse",
        {"input": [USER], "output": {"content": "a"}},
        [USER, SAID],
    ),
    "langsmith of openai": (
        "langsmith",
        {"inputs": {"messages": [USER]}, "outputs": CHOICES, "run_type": "llm"},
        [USER, SAID],
    ),
    "langsmith of langchain": (
        "langsmith",
        {
            "inputs": {
                "messages": [
                    [
                        lc("HumanMessage", content="q", type="human"),
                        lc("AIMessage", content="", tool_calls=[LC_CALL]),
                        lc("ToolMessage", content="7", tool_call_id="c1"),
                    ]
                ]
            },
            "outputs": {
                "generations": [[{"text": "a", "message": lc("AIMessageChunk", content="a")}]]
            },
        },
        CALLED,
    ),
    "langsmith of a graph": (
        "langsmith",
        {
            "inputs": {"messages": [{"type": "human", "content": "q"}]},
            "outputs": {
                "messages": [{"type": "human", "content": "q"}, {"type": "ai", "content": "a"}]
            },
        },
        [USER, SAID],
    ),
    "langsmith data": (
        "langsmith",
        {"inputs": {"question": "q"}, "outputs": {"answer": "a"}},
        [USER, SAID],
    ),
    "openhands": (
        "openai",
        {"messages": [USER], "response": CHOICES, "args": [], "cost": 0.1},
        [USER, SAID],
    ),
    "a text beside messages": ("openai", {"messages": [USER], "response": "a"}, [USER, SAID]),
    "the same text twice": ("openai", {"messages": [USER, SAID], "response": "a"}, [USER, SAID]),
    "choices beside messages": ("openai", {"messages": [USER], **CHOICES}, [USER, SAID]),
    "a batch joined": (
        "openai",
        {"custom_id": "1", "body": {"messages": [USER]}, "response": {"body": CHOICES}},
        [USER, SAID],
    ),
    "a batch of requests": (
        "openai",
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": [USER]}},
        [USER],
    ),
    "anthropic beside messages": (
        "anthropic",
        {"messages": [USER], "response": {"content": [{"type": "text", "text": "a"}]}},
        [USER, SAID],
    ),
    "responses beside input": (
        "responses",
        {"input": [USER], "output": [{"type": "message", **SAID}]},
        [USER, SAID],
    ),
    "a trajectory": ("swe-agent", {"trajectory": [], "history": TRAJECTORY, "info": {}}, CALLED),
    "calls without ids": (
        "openai",
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
                {"role": "tool", "content": "7"},
                SAID,
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}
                ],
            },
            {"role": "tool", "content": "7", "tool_call_id": "call_0"},
            SAID,
        ],
    ),
}


@pytest.mark.parametrize("case", READ)
def test_the_reply_of_a_row_is_read(case: str) -> None:
    name, row, messages = READ[case]
    assert deduce([row]) == name or case == "calls without ids"
    made = json.loads(json.dumps(import_row(row, name)))
    assert made["messages"] == messages
    if name in FORMATS:
        assert export_row(made, name) == row


ADVISED = {
    "hh-rlhf": ({"chosen": "\n\nHuman: q", "rejected": "\n\nHuman: q"}, "split it before the last"),
    "pairs of openai": (
        {"input": {"messages": [USER]}, "preferred_output": [SAID], "non_preferred_output": [SAID]},
        "--prompts.chosen_key=preferred_output",
    ),
    "answers of a batch": ({"custom_id": "1", "response": {"body": CHOICES}}, "beside the body"),
    "claude code": (
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "q"}},
        "--from anthropic",
    ),
    "events of openhands": (
        {"id": 1, "source": "agent", "action": "run", "args": {}, "message": "m"},
        "log completions",
    ),
    "a text alone": ({"input": "q"}, "could be langfuse or responses: name it with --from"),
    "nothing known": ({"text": "t"}, "no known format fits: name it with --from"),
}


@pytest.mark.parametrize("case", ADVISED)
def test_other_rows_are_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    row, sentence = ADVISED[case]
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=sentence):
        convert(path, tmp_path / "out.jsonl", None, "messages")


def test_pairs_of_openai_are_read_as_the_advice_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(ADVISED["pairs of openai"][0]) + "\n")
    assert main(["check", str(path)]) == 1
    said = capsys.readouterr().out
    settings = [
        word for word in said.split() if word.startswith("--prompts.") and "_output" in word
    ]
    settings += ["--prompts.chat_template=true", "--prompts.prompt_key=input.messages"]
    assert main(["check", str(path), "--recipe", "dpo", *settings]) == 0


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("openai", {"messages": [USER, SAID], "response": "b"}, "end with another answer"),
        ("openai", {"messages": [USER], "response": 3}, "expected an object or a text"),
        ("openai", {"messages": [USER], "response": {"score": 1}}, "there is no 'choices'"),
        ("langfuse", {"input": [USER], "output": None}, "expected messages or a text"),
        ("langfuse", {"input": [USER], "output": []}, "there is no reply"),
        ("langfuse", {"input": {"a": 1, "b": "q"}, "output": "a"}, "an object with 'a', 'b'"),
        ("langsmith", {"inputs": {"messages": [USER]}, "outputs": {}}, "an object with nothing"),
        ("langfuse", {"input": "q", "output": {"choices": [SAID, SAID]}}, "one choice, got 2"),
        ("langsmith", {"inputs": [[USER], [USER]], "outputs": "a"}, "one conversation, got 2"),
        ("alpaca", {"instruction": "q", "output": "a", "history": [["h"]]}, "history"),
        ("alpaca", {"instruction": "q"}, "output"),
        ("swe-agent", {"trajectory": []}, "history"),
    ],
)
def test_a_row_whose_reply_is_not_clear_is_refused(
    name: str, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        import_row(row, name)


@pytest.mark.parametrize("case", [*READ])
def test_check_proposes_what_convert_reads(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, row, _ = READ[case]
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(row) + "\n")
    words = ["check", str(path), "--prompts.answer_key=gold"]
    refused = main(words) == 1
    proposed = f"makes messages of {name} logs" in capsys.readouterr().out
    assert refused
    assert proposed == (case != "calls without ids"), "sft reads these as they are"


def test_a_file_with_one_object(tmp_path: Path) -> None:
    path, target = tmp_path / "run.traj", tmp_path / "out.jsonl"
    path.write_text(json.dumps(READ["a trajectory"][1], indent=2))
    assert convert(path, target, None, "messages").num_records == 1
    assert json.loads(target.read_text())["messages"] == CALLED
    other = tmp_path / "one.json"
    for row in ({"messages": [USER], "tools": []}, {"prompt": "q", "answer": "a"}):
        other.write_text(json.dumps(row))
        (record,) = read_records(str(other))
        assert record.row == row
    other.write_text(json.dumps({"name": "n", "rows": [{"prompt": "q"}, {"prompt": "r"}]}))
    assert len(read_records(str(other))) == 2
