"""Marks, thoughts and empty arguments of messages, read alike by training and conversion."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spmd_rl.data.logs.formats import export_row, import_row
from spmd_rl.data.message_fields import plain_fields
from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import DataError
from tests.unit.data.chat_templates import CHATML, QWEN, tokenizer_of

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
CFG = PromptConfig(chat_template=True, prompt_key="messages", answer_key="", shuffle=False)
NOT_LEARNED = [
    *({name: value} for name in ("weight", "loss", "loss_mask") for value in (0, 0.0, False)),
    *({name: False} for name in ("trainable", "train", "training")),
    {"masked": True},
    {"masked": 1, "loss": 0, "weight": None},
]
THOUGHTS = [
    {"reasoning_content": "because"},
    {"reasoning": "because", "reasoning_content": None},
    {"reasoning": "because", "reasoning_details": [{"type": "reasoning.text", "text": "other"}]},
    {"reasoning_details": [{"summary": "be"}, {"text": "cause"}, {"data": "x", "text": None}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "because", "signature": "s"}]},
    {"content": [{"type": "thinking", "thinking": "because"}, {"type": "text", "text": "good"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "because"}]}]},
]

Jsonl = Callable[..., str]


def learned(jsonl: Jsonl, row: dict[str, Any], template: str = CHATML) -> list[str]:
    """The texts that supervised fine-tuning learns of a conversation."""
    tokenizer = tokenizer_of(template)
    pairs = SftPairs(jsonl(json.dumps(row)), CFG, tokenizer).next(1)
    return [tokenizer.decode(pair.tokens[pair.mask]) for pair in pairs]


@pytest.mark.parametrize("mark", NOT_LEARNED)
def test_a_message_that_is_marked_is_not_learned(jsonl: Jsonl, mark: dict[str, Any]) -> None:
    messages = [USER, BAD | mark, USER, GOOD | {"loss": True, "masked": 0}]
    assert learned(jsonl, {"messages": messages}) == ["good<|end|>"]
    for name in ("messages", "openai"):
        row = import_row({"messages": messages}, name)
        assert [one.get("weight") for one in row["messages"]] == [None, 0, None, 1]
        assert learned(jsonl, row) == ["good<|end|>"]
    assert export_row(row, "openai") == {"messages": messages}
    assert export_row({"messages": row["messages"]}, "openai")["messages"][1]["weight"] == 0


@pytest.mark.parametrize("mark", NOT_LEARNED)
def test_marks_of_other_formats_are_kept(jsonl: Jsonl, mark: dict[str, Any]) -> None:
    rows = {
        "sharegpt": {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "bad"} | mark,
                {"from": "function_call", "value": '{"name": "f", "arguments": null}'},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": "good"},
            ]
        },
        "responses": {
            "input": [
                {"role": "user", "content": "q"},
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": "bad"} | mark,
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": " "},
                {"type": "function_call_output", "call_id": "c", "output": "7"},
                {"type": "message", "role": "assistant", "content": "good"},
            ]
        },
    }
    for name, row in rows.items():
        made = import_row(row, name)
        call = '<call>{"name": "f", "arguments": {}}<|end|>'
        assert learned(jsonl, made) == [call + "good<|end|>"], "the call is a message of its own"
        assert export_row(made, name) == row
    blocks = [{"type": "text", "text": "bad"}]
    said = {"role": "assistant", "content": blocks} | mark
    row = import_row({"messages": [USER, said, USER, GOOD]}, "anthropic")
    assert learned(jsonl, row) == ["good<|end|>"]
    parts = {
        "contents": [{"parts": [{"text": "q"}]}, {"role": "model", "parts": blocks[:0]} | mark]
    }
    assert import_row(parts, "gemini")["messages"][1]["weight"] == 0


@pytest.mark.parametrize("name", ["anthropic", "responses", "gemini", "raw"])
def test_a_format_without_marks_refuses_them(name: str) -> None:
    with pytest.raises(DataError, match="weight"):
        export_row({"messages": [USER, BAD | {"weight": 0}]}, name)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"loss": 0.5}, r"messages\[1\].loss: expected 0 or 1, got 0.5"),
        ({"loss_mask": [0, 1]}, r"messages\[1\].loss_mask: expected 0 or 1"),
        ({"trainable": "false"}, r"messages\[1\].trainable: expected 0 or 1, got 'false'"),
        ({"weight": 1, "masked": True}, "'weight' and 'masked' disagree"),
        (
            {"content": [{"type": "text", "text": "a", "weight": 0}]},
            r"messages\[1\].content\[0\].weight: a message is learned as a whole",
        ),
        (
            {"tool_calls": [{"name": "f", "train": False}]},
            r"messages\[1\].tool_calls\[0\].train: a message is learned as a whole",
        ),
        ({"learned": False}, "ignores the 'learned'"),
        ({"loss_scale": 0}, "ignores the 'loss_scale'"),
        ({"mask": True}, "ignores the 'mask'"),
        ({"reasoning": "a", "reasoning_content": "b"}, "are two different thoughts"),
        ({"reasoning": {"effort": "low"}}, r"messages\[1\].reasoning: expected a text"),
        ({"reasoning_details": [3]}, r"messages\[1\].reasoning_details\[0\]: expected a thought"),
        ({"reasoning": "a"}, "ignores the 'reasoning_content'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    jsonl: Jsonl, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        learned(jsonl, {"messages": [USER, BAD | fields, USER, GOOD]})


def test_no_message_of_others_is_learned(jsonl: Jsonl) -> None:
    assert learned(jsonl, {"messages": [USER | {"loss": 0}, GOOD]}) == ["good<|end|>"]
    with pytest.raises(DataError, match=r"messages\[0\]: this message is marked as learned, but"):
        learned(jsonl, {"messages": [USER | {"loss": True}, GOOD]})


@pytest.mark.parametrize("name", ["prefix", "strict"])
def test_a_truth_value_that_the_template_reads_is_shown(jsonl: Jsonl, name: str) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ '!' if m.prefix }}", 1)
    tokenizer = tokenizer_of(CHATML)
    tokenizer.chat_template = template
    try:
        row = {"messages": [USER, GOOD | {name: False}]}
        if name == "prefix":
            assert learned(jsonl, row) == ["good<|end|>"]
            return
        with pytest.raises(DataError, match="ignores the 'strict'"):
            learned(jsonl, row)
    finally:
        tokenizer.chat_template = CHATML


@pytest.mark.parametrize("fields", THOUGHTS)
def test_a_thought_is_read_under_each_name(jsonl: Jsonl, fields: dict[str, Any]) -> None:
    message = GOOD | fields
    text = "" if isinstance(fields.get("content"), list) and len(fields["content"]) == 1 else "good"
    expected = [f"<think>\nbecause\n</think>\n\n{text}<|end|>"]
    row = {"messages": [USER, message]}
    assert learned(jsonl, row, QWEN) == expected
    for name in ("openai", "messages"):
        assert learned(jsonl, import_row(row, name), QWEN) == expected
    if "content" not in fields:
        turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"} | fields]
        made = import_row({"conversations": turns}, "sharegpt")
        assert learned(jsonl, made, QWEN) == expected
        assert export_row(made, "sharegpt") == {"conversations": turns}


def test_the_thought_of_ollama_is_read_in_logs() -> None:
    row = import_row({"messages": [USER, GOOD | {"thinking": "because"}]}, "openai")
    assert row["messages"][1] == GOOD | {"reasoning_content": "because"}


def test_what_is_encrypted_has_no_text() -> None:
    hidden = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}
    assert plain_fields("m", GOOD | hidden) == GOOD


def test_answers_of_a_pair(jsonl: Jsonl) -> None:
    def read(prompt: Any, chosen: list[dict[str, Any]]) -> Any:
        row = {"prompt": prompt, "chosen": chosen, "rejected": "bad"}
        cfg = PairConfig(chat_template=True)
        return PreferencePairs(jsonl(json.dumps(row)), cfg, tokenizer_of(CHATML)).next(1)

    assert read([USER], [USER, GOOD | {"loss": 1, "masked": False}])
    assert read([USER, BAD, USER], [USER, BAD | {"weight": 0}, USER, GOOD]), "marks are no words"
    for name, value in (("loss", 0), ("trainable", False), ("masked", 1)):
        with pytest.raises(
            DataError, match=rf"chosen\[1\]: by '{name}' this answer is not learned"
        ):
            read([USER], [USER, GOOD | {name: value}])
    for name, value in (("learned", False), ("loss_scale", 0), ("reasoning", "r")):
        with pytest.raises(DataError, match=f"nothing is learned of '{name}'"):
            read([USER], [GOOD | {name: value}])


@pytest.mark.parametrize("empty", ["", " \n", None, ..., {}, "{}"])
def test_empty_arguments_are_none(jsonl: Jsonl, empty: Any) -> None:
    given = {} if empty is ... else {"arguments": empty}
    call = {"id": "c", "type": "function", "function": {"name": "f", **given}}
    result = {"role": "tool", "content": "7", "tool_call_id": "c"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {"messages": [USER, called, result, GOOD]}
    expected = ['<call>{"name": "f", "arguments": {}}<|end|>good<|end|>']
    assert learned(jsonl, row) == expected
    used = {"type": "tool_use", "id": "c", "name": "f"} | ({"input": empty} if given else {})
    answered = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
    args = {"args": empty} if given else {}
    rows = {
        "messages": row,
        "openai": row,
        "responses": {
            "input": [
                {"role": "user", "content": "q"},
                {"type": "function_call", "call_id": "c", "name": "f", **given},
                {"type": "function_call_output", "call_id": "c", "output": "7"},
                {"role": "assistant", "content": "good"},
            ]
        },
        "anthropic": {
            "messages": [
                USER,
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [answered]},
                GOOD,
            ]
        },
        "gemini": {
            "contents": [
                {"parts": [{"text": "q"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "f", **args}}]},
                {"parts": [{"functionResponse": {"name": "f", "response": {"output": "7"}}}]},
                {"role": "model", "parts": [{"text": "good"}]},
            ]
        },
        "sharegpt": {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps({"name": "f", **given})},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": "good"},
            ]
        },
    }  # fmt: skip
    for name, one in rows.items():
        assert learned(jsonl, import_row(one, name)) == expected, name


def test_a_reasoning_item_without_text_is_no_turn() -> None:
    user = {"role": "user", "content": "q"}
    for hidden in ({"summary": []}, {"summary": [{"type": "summary_text", "text": ""}]}):
        items = [user, {"type": "reasoning", **hidden}, {"role": "assistant", "content": "a"}]
        made = import_row({"input": items}, "responses")
        assert made["messages"] == [user, {"role": "assistant", "content": "a"}]
    parts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": t}]} for t in "ab"]
    made = import_row({"input": [user, *parts, {"role": "assistant", "content": "c"}]}, "responses")
    assert made["messages"][1:] == [
        {"role": "assistant", "content": "c", "reasoning_content": "ab"}
    ]


@pytest.mark.parametrize("name", ["openai", "responses"])
def test_tools_that_are_no_functions_are_left_out(name: str) -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    wire = function if name == "responses" else {"type": "function", "function": {"name": "f"}}
    others = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [function]}]
    key = "input" if name == "responses" else "messages"
    row = {key: [USER], "tools": [others[0], wire, others[1]]}
    made = import_row(row, name)
    assert [tool["function"]["name"] for tool in made["tools"]] == ["f"]
    assert export_row(made, name) == row
