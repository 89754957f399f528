"""Every format: what is imported is exported again as it was, and the other way round."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.data.logs import anthropic, formats
from spmd_rl.data.logs.formats import (
    FORMATS,
    apply,
    deduce,
    difference,
    export_row,
    import_row,
    same,
)
from spmd_rl.errors import ConfigError, DataError

FAST = settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=2)
FOREIGN = [name for name in FORMATS if name != "messages"]
CHAT = ["openai", "responses", "anthropic", "gemini"]


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """A record that the four chat formats can all say."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        if draw(st.booleans()):
            calls = []
            for _ in range(draw(st.integers(1, 3))):
                function = {"name": draw(st.sampled_from("fg")), "arguments": draw(OBJECTS)}
                calls.append({"id": f"id{number}", "type": "function", "function": function})
                number += 1
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages += [
                {"role": "tool", "content": draw(TEXT), "tool_call_id": call["id"]}
                for call in draw(st.permutations(calls))
            ]
        answer = {"role": "assistant", "content": draw(TEXT)}
        messages.append(answer | ({"reasoning_content": draw(TEXT)} if draw(st.booleans()) else {}))
    made: dict[str, Any] = {"messages": messages, "label": draw(VALUES)}
    if draw(st.booleans()):
        function = {"name": "f", "description": draw(TEXT), "parameters": draw(OBJECTS)}
        made["tools"] = [{"type": "function", "function": function}]
    return made


@FAST
@given(conversations(), st.sampled_from(CHAT))
def test_ours_comes_back(record: dict[str, Any], name: str) -> None:
    row = json.loads(json.dumps(export_row(record, name)))
    assert same(import_row(row, name), record)


@FAST
@given(conversations(), st.sampled_from(FOREIGN))
def test_ours_comes_back_or_is_refused(record: dict[str, Any], name: str) -> None:
    try:
        row = export_row(record, name)
    except DataError:
        assert name in ("sharegpt", "raw")
        return
    assert same({**import_row(row, name), "extra": 0}, {**record, "extra": 0})


def test_sharegpt_and_raw_say_what_they_can() -> None:
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for name in FOREIGN:
        assert import_row(export_row({"messages": plain}, name), name) == {"messages": plain}


@st.composite
def decorated(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A row of a format with fields that our form does not know, at every level of it."""
    name = draw(st.sampled_from(CHAT))
    row = json.loads(json.dumps(export_row(draw(conversations()), name)))
    row["temperature"] = draw(VALUES)
    listed = next(row[key] for key in ("messages", "input", "contents") if key in row)
    for item in listed:
        if draw(st.booleans()):
            item["x_own"] = draw(VALUES)
        if name == "openai" and isinstance(item["content"], str) and draw(st.booleans()):
            item["content"] = [{"type": "text", "text": item["content"], "cache_control": 1}]
        for call in item.get("tool_calls", []):
            function = call["function"]
            function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1)
    return name, row


@FAST
@given(decorated())
def test_a_foreign_row_comes_back(case: tuple[str, dict[str, Any]]) -> None:
    name, row = case
    record = json.loads(json.dumps(import_row(row, name)))
    assert same(export_row(record, name), row)


BY_HAND: dict[str, dict[str, Any]] = {
    "openai": {
        "request": {
            "model": "m",
            "messages": [{"role": "developer", "content": [{"type": "text", "text": "be kind"}]}],
        },
        "response": {"id": "r", "choices": [{"message": {"role": "assistant", "content": "hi"}}]},
    },
    "responses": {
        "instructions": "be kind",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "z"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{ "a":1}'},
            {"type": "function_call_output", "call_id": "c", "output": "hi"},
        ],
    },
    "anthropic": {
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                    {"type": "text", "text": "after"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "hi", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    },
    "gemini": {
        "system_instruction": "be kind",
        "contents": [
            {"parts": [{"text": "q"}]},
            {
                "role": "model",
                "parts": [
                    {"functionCall": {"name": "f", "args": {"a": 1}}, "thoughtSignature": "s"},
                    {"function_call": {"name": "g", "args": {}}},
                ],
            },
            {
                "role": "function",
                "parts": [
                    {"functionResponse": {"name": "g", "response": {"output": "hi"}}},
                    {"functionResponse": {"name": "f", "response": {"n": 2}}},
                ],
            },
        ],
    },
    "sharegpt": {
        "id": 7,
        "system": "be kind",
        "tools": "",
        "conversations": [
            {"from": "human", "value": "q", "weight": 0},
            {"from": "function_call", "value": '{"name": "f", "arguments": "{}"}'},
            {"from": "observation", "value": "hi"},
        ],
    },
    "raw": {"prompt": "be kind", "completion": "hi", "score": 1},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_rows_written_by_hand(name: str) -> None:
    row = BY_HAND[name]
    record = import_row(row, name)
    texts = [message["content"] for message in record["messages"]]
    assert texts[0] == "be kind"
    assert "hi" in texts
    assert same(export_row(record, name), row)
    assert deduce([row]) == name


def test_gemini_results_without_ids_find_their_calls() -> None:
    messages = import_row(BY_HAND["gemini"], "gemini")["messages"]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["call_1", "call_0"]


def test_a_changed_conversation_is_not_overwritten_by_what_was_kept() -> None:
    record = import_row(BY_HAND["anthropic"], "anthropic")
    record["messages"][1]["content"] = "another question"
    assert export_row(record, "anthropic")["messages"][0]["content"] == "another question"


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("openai", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image"),
        ("responses", {"input": [{"type": "web_search_call"}]}, "web_search_call"),
        ("anthropic", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ("gemini", {"contents": [{"parts": [{"inlineData": {}}]}]}, "inlineData"),
        ("sharegpt", {"conversations": [{"from": "observation", "value": "1"}]}, "without a call"),
        ("raw", {"prompt": "q"}, "completion"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "'content'"),
        ("openai", {"messages": [{"role": "user", "content": "q"}], "tools": 3}, "tools"),
    ],
)
def test_what_cannot_be_converted_is_refused(name: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        import_row(row, name)


@FAST
@given(st.sampled_from([*FORMATS]), st.data())
def test_any_json_is_converted_or_refused(name: str, data: st.DataObject) -> None:
    keys = st.sampled_from(
        "messages input contents conversations prompt completion tools system request".split()
    )
    row = data.draw(st.dictionaries(keys, VALUES | st.lists(OBJECTS, max_size=2), max_size=4))
    try:
        made = import_row(row, name)
    except DataError:
        return
    assert same(export_row(made, name), row)


def test_an_unclear_format_has_to_be_named() -> None:
    for row in ({"text": "t"}, {"input": "q", "contents": []}):
        with pytest.raises(ConfigError, match="--from"):
            deduce([row])


@FAST
@given(VALUES, VALUES)
def test_a_difference_makes_one_value_of_the_other(have: Any, want: Any) -> None:
    assert same(apply(have, difference(have, want)), want)


def test_a_reader_that_drops_a_field_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(row: dict[str, Any]) -> dict[str, Any]:
        made = anthropic.read(row)
        for message in made["messages"]:
            message.pop("reasoning_content", None)
        return made

    broken = formats.Format(forgetful, anthropic.write)
    monkeypatch.setitem(FORMATS, "anthropic", broken)
    with pytest.raises((AssertionError, DataError)):
        test_ours_comes_back.hypothesis.inner_test(  # type: ignore[attr-defined]
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a", "reasoning_content": "t"},
                ]
            },
            "anthropic",
        )


@FAST
@given(conversations(), VALUES)
def test_sharegpt_comes_back_in_both_directions(record: dict[str, Any], own: Any) -> None:
    """ShareGPT has no ids and no thoughts: calls are numbered, and results stand in their order."""
    numbered = {}
    for message in record["messages"]:
        message.pop("reasoning_content", None)
        for call in message.get("tool_calls", []):
            numbered[call["id"]] = call["id"] = call["id"].replace("id", "call_")
    order = iter(numbered.values())
    for message in record["messages"]:
        if message["role"] == "tool":
            message["tool_call_id"] = next(order)
    row = json.loads(json.dumps(export_row(record, "sharegpt")))
    assert same(import_row(row, "sharegpt"), record)
    row["conversations"][0]["own"] = own
    assert same(export_row(import_row(row, "sharegpt"), "sharegpt"), row)
