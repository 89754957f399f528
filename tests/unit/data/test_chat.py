"""What a chat template is given: messages, tools, system prompt and arguments; and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.render import chat as chat_module
from spmd_rl.data.render.chat import Chat, ChatFormat, chat_of, render
from spmd_rl.data.render.messages import messages_of
from spmd_rl.data.render.shown import ShownParts
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.recipes import rejection_sampling
from spmd_rl.types.prompts import Prompt
from tests.unit.data.chat_templates import CHATML, LLAMA, MISTRAL, QWEN, tokenizer_of
from tests.unit.data.conftest import CharTokenizer
from tests.unit.hooks.cases import make_sample

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Jsonl = Callable[..., str]


def text_of(row: dict[str, Any], template: str = CHATML, **cfg: Any) -> str:
    chat = chat_of(DataRecord("f:1", row), ChatFormat(chat_template=True, **cfg))
    assert chat
    return render(chat, tokenizer_of(template), generation_prompt=True)


def test_tools_are_a_list_or_json_text() -> None:
    shown = "<|start|>tools\n" + json.dumps([TOOL]) + "<|end|>\n<|start|>user\nhi<|end|>\n"
    for tools in ([TOOL], json.dumps([TOOL])):
        assert text_of({"prompt": "hi", "tools": tools}).startswith(shown)
    for tools in (None, [], "", "[]", "null"):
        assert text_of({"prompt": "hi", "tools": tools}) == text_of({"prompt": "hi"})
    assert text_of({"prompt": "hi", "tools": [TOOL]}, tools_key="") == text_of({"prompt": "hi"})
    assert text_of({"prompt": "hi", "fns": [TOOL]}, tools_key="fns").startswith(shown)


@pytest.mark.parametrize("tools", ["add", ["add"], {"name": "add"}, "[", 3])
def test_tools_of_another_form(tools: Any) -> None:
    with pytest.raises(DataError, match=r"f:1: tools: (expected tools|this text is not JSON)"):
        text_of({"prompt": "hi", "tools": tools})


def test_tools_are_never_dropped(jsonl: Jsonl) -> None:
    path = jsonl(json.dumps({"prompt": "hi", "answer": "a", "tools": [TOOL]}))
    with pytest.raises(DataError, match=r"train.jsonl:1: tools: tools need prompts.chat_template"):
        Prompts(path, PromptConfig(), tokenizer_of(CHATML))
    cfg = PromptConfig(chat_template=True)
    with pytest.raises(DataError, match="this model's chat template ignores the tools"):
        Prompts(path, cfg, tokenizer_of(LLAMA))
    (prompt,) = Prompts(path, PromptConfig(tools_key=""), tokenizer_of(CHATML)).take(1)
    assert (prompt.text, prompt.meta, prompt.chat) == ("hi", {"tools": [TOOL]}, {})


def test_the_nearest_system_prompt_counts() -> None:
    cfg = {"system": "all", "system_key": "own"}
    begins = {text: f"<|start|>system\n{text}<|end|>\n" for text in ("all", "mine", "Be brief.")}
    for row, system in (
        ({"prompt": "hi"}, "all"),
        ({"prompt": "hi", "own": None}, "all"),
        ({"prompt": "hi", "own": ""}, "all"),
        ({"prompt": [USER], "own": "mine"}, "mine"),
        ({"prompt": [SYSTEM, USER]}, "Be brief."),
    ):
        assert text_of(row, **cfg).startswith(begins[system])
    developer = {"role": "developer", "content": "Be brief."}
    assert "all" not in text_of({"prompt": [developer, USER]}, **cfg)
    with pytest.raises(DataError, match="f:1: own: this record has a second system prompt"):
        text_of({"prompt": [SYSTEM, USER], "own": "mine"}, **cfg)
    with pytest.raises(DataError, match="f:1: own: expected a string, got 3"):
        text_of({"prompt": "hi", "own": 3}, **cfg)


def test_a_system_prompt_that_the_template_ignores() -> None:
    blind = LLAMA.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    tokenizer = tokenizer_of(LLAMA)
    chat = chat_of(DataRecord("f:1", {"prompt": [SYSTEM, USER]}), ChatFormat(chat_template=True))
    assert chat
    ShownParts(tokenizer).require([chat])
    tokenizer.chat_template = blind
    try:
        with pytest.raises(DataError, match=r"f:1: prompt\[0\]: .* ignores the system prompt"):
            ShownParts(tokenizer).require([chat])
    finally:
        tokenizer.chat_template = LLAMA


def test_tool_calls_that_the_template_ignores() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    chat = chat_of(DataRecord("f:1", {"prompt": messages}), ChatFormat(chat_template=True))
    assert chat
    ShownParts(tokenizer_of(CHATML)).require([chat])
    with pytest.raises(DataError, match=r"f:1: prompt\[1\]: .* ignores the tool calls"):
        ShownParts(tokenizer_of(LLAMA)).require([chat])


def test_arguments_of_a_record_go_before_those_for_all() -> None:
    cfg: dict[str, Any] = {"template_kwargs": {"no_thinking": True}, "template_kwargs_key": "args"}
    ends = "<think>\n\n</think>\n\n"
    for args, expected in (
        (None, True),
        ({"no_thinking": False}, False),
        ('{"no_thinking": false}', False),
        ({"no_thinking": None}, True),
    ):
        assert text_of({"prompt": "hi", "args": args}, QWEN, **cfg).endswith(ends) is expected
    with pytest.raises(DataError, match="f:1: args: template arguments cannot have 'tokenize'"):
        text_of({"prompt": "hi", "args": {"tokenize": True}}, **cfg)
    with pytest.raises(DataError, match="f:1: args: expected an object"):
        text_of({"prompt": "hi", "args": [1]}, **cfg)


@pytest.mark.parametrize("name", ["system", "system_key", "template_kwargs_key"])
def test_settings_of_a_template_need_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"prompts.{name} needs prompts.chat_template = true"):
        ChatFormat(**{name: "x"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompts.template_kwargs cannot have 'tools'"):
        ChatFormat(chat_template=True, template_kwargs={"tools": []})


def test_what_the_template_refuses_is_named() -> None:
    row = {"prompt": [USER, USER]}
    with pytest.raises(
        DataError, match=r"^f:1: prompt: the chat template refuses this: roles must alternate"
    ):
        text_of(row, MISTRAL)
    with pytest.raises(DataError, match="f:1: prompt: half of a surrogate pair"):
        text_of({"prompt": [{"role": "user", "content": "\ud800"}]})


LOOPS = {
    "ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "messages": "{% for a in range(9999) %}{% for m in messages %}{% for c in m.content %}"
    "{% endfor %}{% endfor %}{% endfor %}",
}


class Looping(CharTokenizer):
    """A tokenizer with this template."""

    def __init__(self, text: str) -> None:
        self.text = text

    def apply_chat_template(self, conversation: list[Any], *, tokenize: bool, **kwargs: Any) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), _ = render_jinja_template([conversation], chat_template=self.text, **kwargs)
        return text


@pytest.mark.parametrize("loop", LOOPS)
def test_a_template_that_loops_is_refused(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MAX_STEPS", 20_000)
    chat = Chat("f:1: prompt", [{"role": "user", "content": "x" * 99}], [], {})
    with pytest.raises(DataError, match=r"f:1: prompt: .* it loops, as it has run 20,000 lines"):
        render(chat, Looping(LOOPS[loop]), generation_prompt=True)
    before = sys.gettrace()
    assert render(chat, tokenizer_of(CHATML), generation_prompt=True)
    assert sys.gettrace() is before


def test_messages_in_the_form_of_openai_and_of_parquet() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "assistant", "tool_calls": [{"name": "now", "arguments": ""}]},
    ]
    first, second, third = messages_of("f:1: prompt", given)
    assert first["content"] == "a\nb"
    assert (second["content"], "name" in second) == ("", False)
    assert second["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert third["tool_calls"] == [{"name": "now", "arguments": {}}]
    assert given[1]["content"] is None, "the record stays as it was"


def test_parts_and_calls_that_are_json_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    given = [
        {"role": "user", "content": json.dumps(parts)},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([call])},
        {"role": "user", "content": json.dumps([TOOL])},
        {"role": "assistant", "content": "x", "tool_calls": ""},
    ]
    first, second, third, fourth = messages_of("f:1: prompt", given)
    assert first["content"] == "a\nb"
    assert second["tool_calls"] == [call]
    assert third["content"] == json.dumps([TOOL]), "what is no part is what a user says"
    assert fourth == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user"}, r": expected a message with 'role' and 'content'"),
        ({"content": "x"}, r": expected a message"),
        ({"role": 1, "content": "x"}, r": expected a message"),
        ({"role": "user", "content": {}}, r".content: expected a text or a list"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r".content: a part"),
        ({"role": "assistant", "tool_calls": "x"}, r".tool_calls: this text is not JSON"),
        ({"role": "assistant", "tool_calls": "{}1"}, r".tool_calls: this text is not JSON"),
        ({"role": "assistant", "tool_calls": '{"a": 1}'}, r".tool_calls: expected a list"),
        ({"role": "assistant", "tool_calls": [{}]}, r"tool_calls\[0\]: a tool call needs the"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r".tool_calls\[0\].function.arguments: this text is not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            r"tool_calls\[0\].arguments: expected an object",
        ),
    ],
)
def test_a_message_of_another_form_is_named(message: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=rf"^f:1: prompt\[1\].*{sentence}"):
        messages_of("f:1: prompt", [USER, message])


def test_a_prompt_carries_its_chat_once(jsonl: Jsonl) -> None:
    row = {"messages": [USER], "tools": json.dumps([TOOL]), "sys": "s", "id": 7}
    row["args"] = {"language": "fr"}
    cfg = PromptConfig(
        chat_template=True,
        prompt_key="messages",
        answer_key="",
        system_key="sys",
        template_kwargs_key="args",
    )
    (prompt,) = Prompts(jsonl(json.dumps(row)), cfg, tokenizer_of(CHATML)).take(1)
    assert prompt.meta == {"id": 7}
    assert prompt.chat == {
        "messages": [{"role": "system", "content": "s"}, USER],
        "tools": [TOOL],
        "template_kwargs": {"language": "fr"},
    }
    assert prompt.text.startswith("<|start|>tools\n")
    (back,) = Prompt.to_columns([prompt]).rows()
    assert back.chat == prompt.chat


def test_no_second_bos(jsonl: Jsonl) -> None:
    path = jsonl(json.dumps({"prompt": "hi", "answer": "a"}))
    tokenizer = tokenizer_of(LLAMA)
    (prompt,) = Prompts(path, PromptConfig(chat_template=True), tokenizer).take(1)
    assert prompt.tokens.tolist().count(tokenizer.bos_token_id) == 1
    assert prompt.tokens[0] == tokenizer.bos_token_id


def test_answers_of_rejection_sampling_are_learned_after_the_same_prompt(jsonl: Jsonl) -> None:
    row = {"prompt": "hi", "answer": "a", "tools": [TOOL], "args": {"language": "fr"}, "id": 7}
    tokenizer = tokenizer_of(CHATML)
    cfg = PromptConfig(chat_template=True, system="s", template_kwargs_key="args")
    (prompt,) = Prompts(jsonl(json.dumps(row)), cfg, tokenizer).take(1)
    written = rejection_sampling.record_of(prompt, make_sample("yes"))
    assert (written["answer"], written["meta"]) == ("yes", {"id": 7})
    again = PromptConfig(chat_template=True, template_kwargs_key="template_kwargs")
    (pair,) = SftPairs(jsonl(json.dumps(written), name="sft.jsonl"), again, tokenizer).next(1)
    assert pair.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
    assert not pair.mask[: len(prompt.tokens)].any()
    plain = rejection_sampling.record_of(prompt.replace(chat={}), make_sample("yes"))
    assert plain["prompt"] == prompt.text
