"""What a dialect tells a client is what the client sends back, and no field is passed over."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.data.logs import anthropic, openai_chat, openai_responses
from spmd_rl.data.logs.form import call, message, tool
from spmd_rl.gateway.dialects import chat, completions, messages, responses, tokens
from spmd_rl.gateway.dialects.fields import read_body
from spmd_rl.gateway.dialects.request import (
    PolicyReply,
    Refused,
    ReplyRequest,
    ReplyStart,
    SamplingRules,
    shortest,
)
from spmd_rl.gateway.message_tree import MessagePath, same_thoughts
from spmd_rl.gateway.replies import ReplyPiece
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.types.token_data import TokenData

RULES = SamplingRules(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0)
ASKED = [message("user", "hi")]
TOOL = tool("f", "does f", {"type": "object", "properties": {}})
words = st.text("ab é\n", max_size=5)
replies = st.builds(
    lambda text, thought, calls: message(
        "assistant",
        text,
        reasoning_content=thought,
        tool_calls=[call(f"call_{n}", "f", one) for n, one in enumerate(calls)],
    ),
    words,
    words,
    st.lists(st.dictionaries(words, st.integers(0, 9) | words, max_size=2), max_size=2),
)


class Letters(EpisodeTexts):
    """A tokenizer in which each token is a letter."""

    def __init__(self) -> None:
        pass

    def decode(self, tokens: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token) for token in tokens)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()


def drawn_of(reply: dict[str, Any], finish: Any = "stop") -> PolicyReply:
    data = TokenData(
        np.array([5, 6], np.int32), np.array([-0.1, -2], np.float32), np.array([3, 3], np.int32)
    )
    begun = ReplyStart("r1", 1700000000, "policy", 3, 1)
    ids = np.array([1, 2, 3], np.int32)
    return PolicyReply(begun, reply, finish, "", data, lambda: ids, Letters())


def pieces_of(reply: dict[str, Any]) -> Iterator[ReplyPiece]:
    """The reply as a stream, calls before the rest of the text."""
    for kind in ("reasoning_content", "content"):
        text = reply.get(kind, "")
        yield from (ReplyPiece(kind, part) for part in (text[:2], text[2:]) if part)
    yield from (ReplyPiece("tool_call", call=made) for made in reply.get("tool_calls", ()))


def events(stream: Any, reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of all events, as a client reads it."""
    parts = [*stream.start()]
    for piece in pieces_of(reply):
        parts += stream.piece(piece)
    parts += stream.end(drawn_of(reply))
    lines = b"".join(parts).decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def is_held(reply: dict[str, Any], read: list[dict[str, Any]]) -> None:
    """The client's messages are those that are held, by the one rule."""
    held = MessagePath.of([*ASKED, reply])
    given = MessagePath.of(read)
    assert given.digests == held.digests
    assert same_thoughts(held.thoughts, given.thoughts)


@given(replies)
def test_a_chat_client_sends_back_what_is_held(reply: dict[str, Any]) -> None:
    told = chat.answer(ReplyRequest(model=""), drawn_of(reply))["choices"][0]["message"]
    for extra in ({}, {"reasoning_content": None}):
        body = {"messages": [{"role": "user", "content": "hi"}, {**told, **extra}]}
        is_held(reply, openai_chat.read(body)["messages"])
    deltas = [
        one["choices"][0]["delta"]
        for one in events(chat.ChatStream(ReplyRequest(model=""), BEGUN), reply)
    ]
    joined: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for delta in deltas:
        joined["content"] += delta.get("content") or ""
        joined["tool_calls"] += delta.get("tool_calls", [])
    body = {"messages": [{"role": "user", "content": "hi"}, joined]}
    is_held(reply, openai_chat.read(body)["messages"])


BEGUN = ReplyStart("r1", 1700000000, "policy", 3, 1)


@given(replies)
def test_a_responses_client_sends_back_what_is_held(reply: dict[str, Any]) -> None:
    whole = responses.answer(ReplyRequest(model=""), drawn_of(reply))["output"]
    told = events(responses.ResponseStream(ReplyRequest(model=""), BEGUN), reply)
    assert [one["sequence_number"] for one in told] == [*range(len(told))]
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert done == whole == told[-1]["response"]["output"]
    texts = [one["delta"] for one in told if one["type"] == "response.output_text.delta"]
    assert "".join(texts) == reply["content"]
    body = {"input": [{"role": "user", "content": "hi"}, *whole]}
    is_held(reply, openai_responses.read(body)["messages"])


@given(replies)
def test_an_anthropic_client_sends_back_what_is_held(reply: dict[str, Any]) -> None:
    whole = messages.answer(ReplyRequest(model=""), drawn_of(reply))["content"]
    told = events(messages.MessageStream(ReplyRequest(model=""), BEGUN), reply)
    blocks: list[dict[str, Any]] = []
    for one in told:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append(dict(one["content_block"]))
        elif one["type"] == "content_block_delta":
            delta, block = one["delta"], blocks[one["index"]]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
    assert blocks == whole
    body = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": whole}]
    }
    is_held(reply, anthropic.read(body)["messages"])


def test_log_probs_come_back_bit_for_bit() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 9
    values = np.concatenate([values, np.float32([-1e-9, -0.0, -1e30, 1.0])])
    text = json.dumps(shortest(values))
    assert np.array(json.loads(text), np.float32).tobytes() == values.tobytes()
    assert max(len(one) for one in json.loads(text, parse_float=str)) <= 15


def test_the_wire_of_tokens() -> None:
    body = {
        "model": "m",
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "temperature": 0.7,
            "max_tokens": 9,
            "stop_token_ids": [4],
            "logprobs": 1,
            "skip_special_tokens": False,
        },
        "cache_salt": "x",
        "priority": 3,
    }
    asked = tokens.read(body, RULES)
    assert asked.token_ids is not None and asked.token_ids.tolist() == [1, 2, 3]
    assert (asked.max_tokens, asked.stop_ids) == (9, (4,))
    assert asked.ignored == ("cache_salt", "priority")
    choice = tokens.answer(asked, drawn_of(message("assistant", "")))["choices"][0]
    assert choice["token_ids"] == [5, 6]
    rows = choice["logprobs"]["content"]
    assert [one["token"] for one in rows] == ["token_id:5", "token_id:6"]
    assert rows[0]["logprob"] == -0.1
    assert choice["versions"] == [3, 3]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
INPUT = {"input": "hi"}
TOKENS = {"token_ids": [1]}
BAD_CALL = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("dialect", "body", "field"),
    [
        (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (chat, {"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
        (chat, CHAT | {"temperature": 0.5}, "temperature"),
        (chat, CHAT | {"top_p": 0.9}, "top_p"),
        (chat, CHAT | {"n": 2}, "n"),
        (chat, CHAT | {"logit_bias": {"1": 2}}, "logit_bias"),
        (chat, CHAT | {"presence_penalty": 1}, "presence_penalty"),
        (chat, CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        (chat, CHAT | {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        (chat, CHAT | {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (chat, CHAT | {"function_call": {"name": "f"}}, "function_call"),
        (chat, CHAT | {"guided_json": {"type": "object"}}, "guided_json"),
        (chat, CHAT | {"best_of": 2}, "best_of"),
        (chat, CHAT | {"prompt_logprobs": 1}, "prompt_logprobs"),
        (chat, CHAT | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (chat, CHAT | {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (messages, CHAT | {"chat_template_kwargs": {"continue_final_message": True}},
         "chat_template_kwargs"),
        (responses, INPUT | {"chat_template_kwargs": {"think": "false"}}, "chat_template_kwargs"),
        (chat, CHAT | {"max_tokens": 0}, "max_tokens"),
        (chat, CHAT | {"max_tokens": True}, "max_tokens"),
        (chat, CHAT | {"max_tokens": "4"}, "max_tokens"),
        (chat, CHAT | {"stop": [""]}, "stop"),
        (chat, CHAT | {"stop": ["a"] * 99}, "stop"),
        (chat, CHAT | {"stop_token_ids": [-1]}, "stop_token_ids"),
        (chat, CHAT | {"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "hi"}, "messages"),
        (chat, {"messages": [3]}, "messages[0]"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
        (chat, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        (chat, {"messages": [{"role": "assistant", "content": None, "tool_calls": [BAD_CALL]}]},
         "messages[0].tool_calls[0].arguments"),
        (chat, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (chat, {"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        (chat, CHAT | {"tools": [{}]}, "tools[0]"),
        (chat, CHAT | {"tools": [3]}, "tools[0]"),
        (responses, INPUT | {"previous_response_id": "x"}, "previous_response_id"),
        (responses, INPUT | {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (responses, INPUT | {"include": ["file_search_call.results"]}, "include"),
        (responses, INPUT | {"include": [{}]}, "include"),
        (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (messages, CHAT | {"tool_choice": {"type": "any"}}, "tool_choice"),
        (messages, CHAT | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        (messages, CHAT | {"temperature": 0.1}, "temperature"),
        (messages, CHAT | {"top_k": 5}, "top_k"),
        (messages, CHAT | {"mcp_servers": [{}]}, "mcp_servers"),
        (completions, {"prompt": "x", "n": 2}, "n"),
        (completions, {"prompt": "x", "best_of": 2}, "best_of"),
        (completions, {"prompt": "x", "logprobs": 2}, "logprobs"),
        (completions, {"prompt": "x", "logprobs": 1, "echo": True}, "logprobs"),
        (completions, {"prompt": ["x", 3]}, "prompt"),
        (completions, {"prompt": "x", "echo": True, "max_tokens": 0}, "max_tokens"),
        (completions, {"prompt": ["x"] * 2, "stream": True}, "stream"),
        (tokens, {"token_ids": []}, "token_ids"),
        (tokens, {"token_ids": [-1]}, "token_ids"),
        (tokens, {"token_ids": [1.5]}, "token_ids"),
        (tokens, {"token_ids": [1 << 31]}, "token_ids"),
        (tokens, TOKENS | {"sampling_params": {"temperature": 0}}, "sampling_params.temperature"),
        (tokens, TOKENS | {"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        (tokens, TOKENS | {"stop_token_ids": [1], "sampling_params": {"stop_token_ids": ["x"]}},
         "sampling_params.stop_token_ids"),
        (tokens, TOKENS | {"stream": True}, "stream"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(dialect: Any, body: Any, field: str) -> None:
    with pytest.raises(Refused) as caught:
        dialect.read(body, RULES)
    assert caught.value.field == field
    assert caught.value.status == 400


def test_hints_are_ignored_by_name() -> None:
    asked = chat.read(CHAT | {"seed": 3, "user": "u", "top_p": 1, "temperature": 0.7}, RULES)
    assert asked.ignored == ("seed", "user")
    claude = CHAT | {"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 3}}
    assert messages.read(claude, RULES).ignored == ("thinking",)


NEUTRAL = {
    "n": 1, "best_of": 1, "prompt_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "length_penalty": 1, "logit_bias": {}, "cache_salt": None,
    "use_beam_search": False, "min_tokens": 0, "ignore_eos": False, "bad_words": [], "echo": False,
    "response_format": {"type": "text"}, "add_generation_prompt": True, "top_logprobs": 0,
    "guided_json": None, "structured_outputs": None, "truncate_prompt_tokens": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (chat, CHAT | NEUTRAL | {"tool_choice": "auto", "parallel_tool_calls": True}),
        (responses, INPUT | NEUTRAL | {"tool_choice": "auto"}),
        (messages, CHAT | NEUTRAL | {"tool_choice": {"type": "auto"}}),
        (tokens, TOKENS | {"sampling_params": NEUTRAL}),
    ],
)
def test_values_that_change_nothing_pass_without_a_word(dialect: Any, body: Any) -> None:
    asked = dialect.read(body, RULES)
    assert (asked.ignored, asked.unknown) == ((), ())


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (chat, CHAT | {"tools": [TOOL]}),
        (responses, INPUT | {"tools": [{"type": "function", "name": "f"}]}),
        (messages, CHAT | {"tools": [{"name": "f", "input_schema": {}}]}),
    ],
)
def test_no_choice_of_tools_is_a_prompt_without_them(dialect: Any, body: Any, choice: Any) -> None:
    assert dialect.read(body, RULES).extras.tools
    assert dialect.read(body | {"tool_choice": choice}, RULES).extras.tools == []


def test_that_tools_run_one_by_one_is_ignored_by_name() -> None:
    asked = chat.read(CHAT | {"tools": [TOOL], "parallel_tool_calls": False}, RULES)
    assert (asked.ignored, len(asked.extras.tools)) == (("parallel_tool_calls",), 1)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    ignored = messages.read(CHAT | {"tool_choice": choice}, RULES).ignored
    assert ignored == ("tool_choice.disable_parallel_tool_use",)


BILLING = "x-anthropic-billing-header: cc_version=2.1.36; cch=1f3;"


@pytest.mark.parametrize(
    "system",
    [
        BILLING + "\n\nBe brief.",
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": BILLING + "\nBe brief."}],
    ],
)
def test_a_line_of_claude_code_that_changes_is_left_out(system: Any) -> None:
    asked = messages.read(CHAT | {"system": system}, RULES)
    assert asked.messages[0] == {"role": "system", "content": "Be brief."}
    assert asked.ignored == ("system.x-anthropic-billing-header",)
    alone = messages.read(CHAT | {"system": BILLING}, RULES)
    assert [one["role"] for one in alone.messages] == ["user"]
    plain = messages.read(CHAT | {"system": "a\n" + BILLING}, RULES)
    assert BILLING in plain.messages[0]["content"] and not plain.ignored


def said(*more: Any) -> list[Any]:
    return [{"role": "user", "content": "hi"}, *more, {"role": "user", "content": "on"}]


@pytest.mark.parametrize(
    ("dialect", "body", "unknown"),
    [
        (chat, CHAT | {"new_field": 1, "functions": [{}], "extra_body": {"a": 1}},
         ("new_field", "functions", "extra_body")),
        (messages, CHAT | {"thread": {"type": "create"}}, ("thread",)),
        (responses, INPUT | {"moderation": {}}, ("moderation",)),
        (tokens, TOKENS | {"x": 1, "sampling_params": {"xtc": 1}}, ("x", "sampling_params.xtc")),
        (chat, {"messages": said({"role": "assistant", "content": "a", "annotations": [],
                "audio": None, "phase": "final"})}, ("messages[].phase",)),
        (chat, {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]},
         ("messages[].content[].cache_control",)),
        (messages, {"messages": said({"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {}, "caller": {"type": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
             "is_error": True, "content": [{"type": "text", "text": "t", "new": 1}]}]}),
            "tools": [{"name": "f", "input_schema": {}, "strict": True}]},
         ("messages[].content[].caller", "messages[].content[].is_error",
          "messages[].content[].content[].new", "tools[].strict")),
        (responses, {"input": [{"role": "user", "content": "hi", "phase": "x"}],
                     "tools": [{"type": "function", "name": "f", "strict": True}]},
         ("input[].phase", "tools[].strict")),
    ],
)  # fmt: skip
def test_what_is_not_known_is_passed_over_by_name(
    dialect: Any, body: Any, unknown: tuple[str, ...]
) -> None:
    assert dialect.read(body, RULES).unknown == unknown


def test_a_text_among_token_ids_takes_no_memory_of_its_own() -> None:
    """An array of them all would have 1 GB."""
    ids: list[Any] = [1] * 1000 + ["x" * (1 << 18)]
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            tokens.read({"token_ids": ids}, RULES)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


bodies = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(sorted({*CHAT, *INPUT, "content", "role", "type", "tools",
      "tool_calls", "function", "name", "arguments", "stop", "system", "text", "sampling_params",
      "token_ids"})), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


FIELDS = (
    "messages input tools system stop token_ids sampling_params stop_sequences tool_choice text"
)


@pytest.mark.parametrize("dialect", [chat, responses, messages, tokens])
@given(body=st.dictionaries(st.sampled_from(FIELDS.split()), bodies))
def test_garbage_is_read_or_refused(dialect: Any, body: Any) -> None:
    with contextlib.suppress(Refused):
        assert isinstance(dialect.read(body, RULES), ReplyRequest)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 100_000,
     b'{"a": 1e999999}', b'{"a": "\\ud8"}'],
)  # fmt: skip
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        read_body(body)


def test_tools_that_are_no_functions_are_left_out_and_named() -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    given = [function, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    asked = responses.read(INPUT | {"tools": given, "store": True}, RULES)
    assert [tool["function"]["name"] for tool in asked.extras.tools] == ["f"]
    assert asked.ignored == ("store", "tools.web_search", "tools.namespace")
    asked = chat.read(CHAT | {"tools": [{"type": "custom", "custom": {"name": "c"}}]}, RULES)
    assert (asked.extras.tools, asked.ignored) == ([], ("tools.custom",))
    for kind in ("x\r\ny: z", 3, ["function"]):
        with pytest.raises(Refused):
            responses.read(INPUT | {"tools": [function, {"type": kind}]}, RULES)


def test_an_earlier_thought_is_read_by_the_name_that_a_client_gives_it() -> None:
    said = {"role": "assistant", "content": "a", "reasoning": "because"}
    body = {"messages": [CHAT["messages"][0], said, CHAT["messages"][0]]}
    assert chat.read(body, RULES).messages[1]["reasoning_content"] == "because"
