"""Replies are read alike in one piece and token by token, and calls that are none stay text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import ConfigError
from spmd_rl.gateway.replies import ReplyFormat, ReplyPiece, ReplyReader, choose_format
from spmd_rl.gateway.reply_call import ReplyText, StopCut
from spmd_rl.gateway.response_templates import FORMS, digest_of
from tests.unit.gateway.fakes import FakeTexts

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 12}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
}
FORMATS = {name: ReplyFormat(form) for name, form in FORMS.items()}
LLAMA_PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
fragments = st.lists(
    st.sampled_from(
        [
            *CALLS.values(),
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "{}",
            '{"name": "f", "arguments": "{}"}',
            '{"name": "f", "arguments": {"a": NaN}}',
            '{"name": "f", "arguments": {"a": "\\ud800"}}',
            "<function=f>",
            "word",
            " \n",
            "<",
        ]
    ),
    max_size=8,
).map("".join)


def read(name: str, chunks: list[str], prompt: str = "", tools: Any = TOOLS) -> Any:
    reader = ReplyReader(FORMATS[name], prompt, tools, lambda number: f"call_{number}")
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)]
    pieces += reader.finish()
    return reader.message, pieces


def joined(pieces: list[ReplyPiece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


@pytest.mark.parametrize("name", FORMS)
@given(text=fragments, data=st.data())
def test_a_stream_says_what_the_whole_reply_says(name: str, text: str, data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=40))
    chunks, at = [], 0
    for size in sizes:
        chunks.append(text[at : at + size])
        at += size
    chunks.append(text[at:])
    whole, streamed = read(name, [text]), read(name, chunks)
    assert whole[0] == streamed[0]
    for message, pieces in (whole, streamed):
        assert joined(pieces, "content") == message["content"]
        assert joined(pieces, "reasoning_content") == message.get("reasoning_content", "")
        made = [piece.call for piece in pieces if piece.kind == "tool_call"]
        assert made == message.get("tool_calls", [])
        kinds = [piece.kind for piece in pieces]
        assert "reasoning_content" not in kinds[kinds.count("reasoning_content") :]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_thought_and_text(name: str) -> None:
    message, _ = read(name, [f"<think>\nhm\n</think>\n\nI ask.\n\n{CALLS[name]}\n"])
    assert message["content"] == "I ask."
    assert message["reasoning_content"] == "hm"
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": {"a": 12}}
    assert made["id"] == "call_0"


def test_llama_calls_with_its_whole_reply() -> None:
    text = '{"name": "f", "parameters": {"a": 12}}'
    for begin in ("", "<|python_tag|>"):
        message, _ = read("llama3", [begin + text], LLAMA_PROMPT)
        assert message["tool_calls"][0]["function"]["arguments"] == {"a": 12}
    message, _ = read("llama3", ["so " + text], LLAMA_PROMPT)
    assert message == {"role": "assistant", "content": "so " + text}


def test_a_thought_that_the_prompt_has_opened() -> None:
    message, _ = read("hermes", ["hm\n</think>\nyes"], "x<|im_start|>assistant\n<think>\n")
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")
    cut, _ = read("hermes", ["hm"], "x<|im_start|>assistant\n<think>\n")
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    "body",
    ["{}", "[]", '{"name": 1}', '{"name": "f"}', '{"name": "f", "arguments": 3}', "{" * 5000,
     '{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}"],
)  # fmt: skip
def test_what_is_no_call_is_content(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    message, _ = read("hermes", [text])
    assert message == {"role": "assistant", "content": text}


def test_a_call_that_was_cut_is_the_text_that_was_drawn() -> None:
    whole = CALLS["hermes"]
    for length in range(1, len(whole)):
        cut = whole[:length]
        message, _ = read("hermes", [cut])
        if "tool_calls" in message:  # nothing but the closing tag is missing
            assert cut.strip().endswith("}}")
        else:
            assert message == {"role": "assistant", "content": cut.rstrip()}


def test_without_tools_a_call_is_text() -> None:
    message, _ = read("hermes", [CALLS["hermes"]], tools=[])
    assert message == {"role": "assistant", "content": CALLS["hermes"]}


def test_a_plain_reply_is_kept_letter_by_letter() -> None:
    reader = ReplyReader(ReplyFormat(None), "", TOOLS, str)
    assert reader.feed(" a\n") == [ReplyPiece("content", " a\n")]
    assert reader.finish() == []
    assert reader.message == {"role": "assistant", "content": " a\n"}


def test_the_form_is_chosen_by_the_template_or_by_name(tmp_path: Path) -> None:
    assert digest_of(" x\n") == digest_of("x")
    assert not choose_format("", None).reads_calls
    assert choose_format("hermes", None).reads_calls
    assert not choose_format("plain", None).reads_calls
    with pytest.raises(ConfigError, match="hermes, qwen_xml"):
        choose_format("nothing", None)
    file = tmp_path / "form.json"
    file.write_text('{"fields": {}}')
    with pytest.raises(ConfigError, match="holds no response template"):
        choose_format(str(file), None)
    file.write_text('{"start_anchor": "x", "fields": {"content": {}, "tool_calls": {"open": "!"}}}')
    assert choose_format(str(file), None).reads_calls


texts = st.text("aβ→😀 <|end|>", max_size=12)


@given(texts, st.lists(st.integers(1, 4), max_size=30), st.booleans())
def test_text_of_tokens_is_whole_whatever_comes_at_once(
    text: str, sizes: list[int], ended: bool
) -> None:
    fake = FakeTexts()
    ids = fake.encode(text.replace("<|end|>", "")) + [*fake.eos_ids] * ended
    drawn = ReplyText(fake.decode, fake.eos_ids)
    parts, at = [], 0
    for size in [*sizes, len(ids)]:
        parts.append(drawn.add(ids[at : at + size]))
        at += size
    parts.append(drawn.finish(ended=ended))
    assert "".join(parts) == text.replace("<|end|>", "")
    assert drawn.num_tokens == len(ids)
    assert not any("\ufffd" in part for part in parts)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_text_is_cut_at_its_first_stop(text: str, stops: list[str]) -> None:
    whole, letters = StopCut(stops), StopCut(stops)
    cut = whole.add(text) + whole.finish()
    assert cut == "".join(map(letters.add, text)) + letters.finish()
    ends = [text[:end] for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    drawn = ends[0] if stops and ends else text  # an engine draws nothing after a stop
    if stops and ends:
        assert drawn in [cut + stop for stop in stops]
        assert drawn == cut + whole.found
    else:
        assert (cut, whole.found) == (text, "")
