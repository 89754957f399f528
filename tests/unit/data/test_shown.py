"""What a chat template leaves out is refused by message and field, and so are arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spmd_rl.config.load import load
from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.render.template_arguments import unread
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import ConfigError, DataError
from tests.unit.data.chat_templates import CHATML, LLAMA, QWEN, tokenizer_of

Jsonl = Callable[..., str]
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "7"}
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
OTHER_CALL = {"function": {"name": "now", "arguments": {}}}
TOOL = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]

# It knows three roles, shows a call or else the content, and of a system prompt only the first.
NARROW = (
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and loop.first %}{{ '<|start|>system\n' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'user' %}{{ '<|start|>user\n' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|start|>assistant\n' }}"
    "{%- if m.tool_calls %}{{ '<call>' + m.tool_calls[0].function.name }}"
    "{%- else %}{{ m.content }}{% endif %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# All that is no user is taken for the assistant.
TWO_ROLES = (
    "{%- for m in messages %}{{ '<|start|>' + ('user' if m.role == 'user' else 'assistant') }}"
    "{{- '\n' + m.content + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Gives the tokenizer a template of this file."""

    def with_template(template: str) -> Any:
        made = tokenizer_of(CHATML)
        monkeypatch.setattr(made, "chat_template", template)
        return made

    return with_template


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": ""} | fields


REFUSED = {
    "a call of old": (CHATML, [USER, assistant(function_call={"name": "f"}), SAID], 1),
    "a thought": (CHATML, [USER, SAID | {"reasoning_content": "3 and 4"}], 1),
    "a thought of an earlier turn": (LLAMA, [USER, SAID | {"thinking": "x"}, USER, SAID], 1),
    "a name": (CHATML, [USER | {"name": "Ann"}, SAID], 0),
    "a name of a tool that nobody called": (
        CHATML,
        [USER, assistant(tool_calls=[CALL]), TOOL | {"name": "now"}, SAID],
        2,
    ),
    "another field of text": (CHATML, [USER, SAID, USER, SAID | {"note": "n"}], 3),
    "a developer in the middle": (
        NARROW,
        [USER, {"role": "developer", "content": "Be brief."}, USER, SAID],
        1,
    ),
    "a second system prompt": (
        NARROW,
        [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}, SAID],
        2,
    ),
    "a result of a function": (NARROW, [USER, SAID, {"role": "function", "content": "4"}, SAID], 2),
    "a role without content": (TWO_ROLES, [USER, {"role": "ipython", "content": ""}, SAID], 1),
    "a role taken for another": (
        TWO_ROLES,
        [USER, SAID, {"role": "tool", "content": "4"}, SAID],
        2,
    ),
    "words beside a call": (
        NARROW,
        [USER, assistant(content="Let me see.", tool_calls=[OTHER_CALL]), SAID],
        1,
    ),
    "arguments": (NARROW, [USER, assistant(tool_calls=[CALL]), SAID], 1),
    "a second call": (NARROW, [USER, assistant(tool_calls=[OTHER_CALL] * 2), SAID], 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_shown_is_refused_by_its_message(
    name: str, jsonl: Jsonl, tokenizer: Callable[[str], Any]
) -> None:
    """In conversations, and in prompts that are drawn from, behind a sound record."""
    template, messages, number = REFUSED[name]
    path = jsonl(*(json.dumps({"messages": one}) for one in ([USER, SAID], messages)))
    cfg = PromptConfig(chat_template=True, prompt_key="messages", answer_key="")
    where = rf"train\.jsonl:2: messages\[{number}\]: this model's chat template ignores the "
    with pytest.raises(DataError, match=where):
        SftPairs(path, cfg, tokenizer(template))
    with pytest.raises(DataError, match=where):
        Prompts(path, cfg, tokenizer(template))


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (QWEN, [USER, SAID | {"reasoning_content": "x"}, USER, SAID | {"reasoning_content": "y"}]),
        (CHATML, [USER, {"role": "developer", "content": "Be brief."}, USER, SAID]),
        (CHATML, [USER, assistant(tool_calls=[CALL, OTHER_CALL], id="3"), SAID]),
        (CHATML, [USER, SAID, {"role": "tool", "content": "4", "tool_call_id": "1"}, SAID]),
        (CHATML, [USER, assistant(tool_calls=[CALL]), TOOL | {"name": "add"}, SAID]),
        (CHATML, [USER | {"name": "", "parts": [], "score": 0.5}, SAID | {"weight": 1}]),
        (LLAMA, [USER, SAID, {"role": "ipython", "content": "4"}, SAID]),
        (TWO_ROLES, [USER, SAID]),
        (NARROW, [{"role": "system", "content": "a"}, USER, assistant(tool_calls=[OTHER_CALL])]),
    ],
)
def test_what_is_shown_is_taken(
    template: str, messages: list[Any], jsonl: Jsonl, tokenizer: Callable[[str], Any]
) -> None:
    """Ids, weights, numbers and what is empty need not be shown, nor thoughts of earlier turns, nor
    the name of a tool whose call is shown.
    """
    cfg = PromptConfig(chat_template=True, prompt_key="messages", answer_key="")
    path = jsonl(json.dumps({"messages": messages}))
    assert SftPairs(path, cfg, tokenizer(template)).next(1)
    assert Prompts(path, cfg, tokenizer(template)).take(1)


def test_each_tool_is_shown(jsonl: Jsonl, tokenizer: Callable[[str], Any]) -> None:
    path = jsonl(json.dumps({"prompt": "hi", "answer": "", "tools": TOOLS}))
    cfg = PromptConfig(chat_template=True)
    Prompts(path, cfg, tokenizer(CHATML))
    first = CHATML.replace("(tools | tojson)", "(tools[0] | tojson)")
    with pytest.raises(DataError, match="this model's chat template ignores the last tool"):
        Prompts(path, cfg, tokenizer(first))


def test_messages_are_counted_without_a_system_prompt_of_the_settings(
    jsonl: Jsonl, tokenizer: Callable[[str], Any]
) -> None:
    path = jsonl(json.dumps({"prompt": [USER, USER | {"name": "Ann"}], "answer": ""}))
    cfg = PromptConfig(chat_template=True, system="Be brief.")
    with pytest.raises(DataError, match=r"prompt\[1\]: .* ignores the 'name'"):
        Prompts(path, cfg, tokenizer(CHATML))
    with pytest.raises(DataError, match="train.jsonl:1: prompt: .* ignores the system prompt"):
        Prompts(path, cfg, tokenizer(NARROW.replace("loop.first", "false")))


def test_a_kind_that_was_shown_is_looked_at_once(
    jsonl: Jsonl, tokenizer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = tokenizer(CHATML), []
    whole = type(made).apply_chat_template
    monkeypatch.setattr(
        type(made), "apply_chat_template", lambda *a, **k: calls.append(1) or whole(*a, **k)
    )
    line = json.dumps({"prompt": [USER, SAID, USER], "answer": ""})
    cfg = PromptConfig(chat_template=True)
    Prompts(jsonl(line), cfg, made)
    of_one = len(calls)
    Prompts(jsonl(*[line] * 50), cfg, made)
    assert len(calls) - of_one == of_one + 49


@pytest.mark.parametrize("field", ["reasoning_content", "function_call", "name"])
def test_a_field_of_a_preferred_answer_is_not_dropped(jsonl: Jsonl, field: str) -> None:
    row = {"prompt": "hi", "chosen": [SAID | {field: "x"}], "rejected": "8"}
    with pytest.raises(DataError, match=rf"jsonl:1: chosen\[0\]: nothing is learned of '{field}"):
        PreferencePairs(jsonl(json.dumps(row)), PairConfig(), tokenizer_of(CHATML))


@pytest.mark.parametrize(
    ("text", "shown"), [("True", True), ("true", True), ("False", False), ("false", False)]
)
def test_truth_values_of_python_on_the_command_line(text: str, shown: bool, jsonl: Jsonl) -> None:
    words = ["chat_template=True", f"template_kwargs.no_thinking={text}"]
    cfg = load(PromptConfig, overrides=words)
    assert cfg.template_kwargs == {"no_thinking": shown}
    path = jsonl(json.dumps({"prompt": "hi", "answer": ""}))
    (prompt,) = Prompts(path, cfg, tokenizer_of(QWEN)).take(1)
    assert prompt.text.endswith("</think>\n\n") == shown


@pytest.mark.parametrize("text", ["False", "True", "None", "true", "false", "null"])
def test_a_truth_value_as_text_is_refused(text: str, jsonl: Jsonl) -> None:
    sentence = f"no_thinking is the text {text!r}, which a template takes for true"
    with pytest.raises(ConfigError, match=rf"prompts.template_kwargs: {sentence}"):
        PromptConfig(chat_template=True, template_kwargs={"no_thinking": text})
    path = jsonl(json.dumps({"prompt": "hi", "answer": "", "args": {"no_thinking": text}}))
    cfg = PromptConfig(chat_template=True, template_kwargs_key="args")
    with pytest.raises(DataError, match=rf"train.jsonl:1: args: {sentence}"):
        Prompts(path, cfg, tokenizer_of(QWEN))


def test_none_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="is the text 'None'"):
        load(PromptConfig, overrides=["chat_template=true", "template_kwargs.no_thinking=None"])


def test_an_argument_that_the_template_does_not_read(jsonl: Jsonl) -> None:
    path = jsonl(json.dumps({"prompt": "hi", "answer": "", "args": {"no_thinkin": True}}))
    sentence = "this model's chat template does not read 'no_thinkin'"
    cfg = PromptConfig(chat_template=True, template_kwargs={"no_thinkin": True})
    with pytest.raises(ConfigError, match=f"prompts.template_kwargs: {sentence}"):
        Prompts(path, cfg, tokenizer_of(QWEN))
    cfg = PromptConfig(chat_template=True, template_kwargs_key="args")
    with pytest.raises(DataError, match=f"train.jsonl:1: args: {sentence}"):
        Prompts(path, cfg, tokenizer_of(QWEN))


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        ("{{ x }}", True),
        ("{% if x is defined and x is false %}y{% endif %}", True),
        ("{% set x = x | default(true) %}{{ x }}", True),
        ("{% macro f() %}{{ x }}{% endmacro %}{{ f() }}", True),
        ("{% for m in y %}{% generation %}{{ x }}{% endgeneration %}{% break %}{% endfor %}", True),
        ({"default": "{{ messages }}", "tool_use": "{{ x }}"}, True),
        ([{"name": "default", "template": "{{ x }}"}], True),
        ("{% if x", True),  # its error is told when it is rendered
        ("{{ y.x }} x", False),
        ("{% set x = 1 %}{{ x }}", False),
        ("{% for x in messages %}{{ x }}{% endfor %}", False),
    ],
)
def test_names_that_a_template_reads(template: Any, is_read: bool) -> None:
    assert unread(["x"], template) == ("" if is_read else "x")
