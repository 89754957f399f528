"""Tokens that were drawn stay as they are, whatever a template makes of the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.logs.form import call, message
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.follow_template import HeldText, TemplateExtras, next_prompt
from tests.unit.data.chat_templates import CHATML, LLAMA, MISTRAL, PLAIN, QWEN
from tests.unit.gateway.fakes import FakeTexts

NONE = TemplateExtras([], {})
HOSTILE = (
    "{{ messages[0].content }}{{ messages | length }}{% if add_generation_prompt %}>{% endif %}"
)
words = st.text("ab <>\n", max_size=6)


class Texts(FakeTexts):
    """A tokenizer whose template may be any text."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.tokenizer = type(self.tokenizer)(
            tokenizer_object=self.tokenizer._tokenizer, chat_template=template
        )


def after_reply(texts: FakeTexts, drawn: str, end: str, reply: Any = None) -> HeldText:
    asked = message("user", "a")
    prompt = texts.render([asked])
    held = [asked, reply or message("assistant", drawn)]
    return HeldText(held, {1: drawn}, prompt + drawn + end, end)


def test_the_tail_alone_is_encoded_where_the_prefix_stays() -> None:
    texts = FakeTexts(CHATML)
    held = after_reply(texts, "b", "<|end|>")
    made = next_prompt(texts, NONE, held, [message("user", "c")], "follow")
    assert not made.is_context
    assert made.text == "\n<|start|>user\nc<|end|>\n<|start|>assistant\n"
    assert made.ids == texts.encode(made.text)


def test_a_turn_that_was_cut_is_closed_before_the_tail() -> None:
    texts = FakeTexts(CHATML)
    made = next_prompt(texts, NONE, after_reply(texts, "b", ""), [message("user", "c")], "follow")
    assert made.text.startswith("<|end|>\n<|start|>user") and not made.is_context


def test_a_call_is_put_back_as_it_was_drawn() -> None:
    texts = FakeTexts(CHATML)
    drawn = 'hm <call>{"name" :"f","arguments":{}}</call>'
    reply = message("assistant", "hm", tool_calls=[call("i", "f", {})])
    held = after_reply(texts, drawn, "<|end|>", reply)
    rest = [message("tool", "4", tool_call_id="i")]
    made = next_prompt(texts, NONE, held, rest, "follow")
    assert made.text == "\n<|start|>tool\n4<|end|>\n<|start|>assistant\n"


def test_a_template_that_drops_thoughts_begins_a_sibling() -> None:
    texts = FakeTexts(QWEN)
    drawn = "<think>\nhm\n</think>\n\nyes"
    reply = message("assistant", "yes", reasoning_content="hm")
    held = after_reply(texts, drawn, "<|end|>", reply)
    rest = [message("user", "c")]
    made = next_prompt(texts, NONE, held, rest, "follow")
    assert made.is_context
    assert made.text == texts.render([*held.messages, *rest])
    assert "hm" not in made.text
    kept = next_prompt(texts, NONE, held, rest, "append")
    assert not kept.is_context
    assert kept.text == "\n<|start|>user\nc<|end|>\n<|start|>assistant\n"


def test_append_closes_a_turn_that_was_cut() -> None:
    texts = FakeTexts(QWEN)
    held = after_reply(texts, "<think>\nhm", "")
    made = next_prompt(texts, NONE, held, [message("user", "c")], "append")
    assert made.text == "<|end|>\n<|start|>user\nc<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize("mode", ["follow", "append"])
@pytest.mark.parametrize("template", [CHATML, LLAMA, QWEN, MISTRAL, PLAIN])
@settings(max_examples=30)
@given(drawn=words, question=words, cut=st.booleans())
def test_held_text_is_a_prefix_or_there_is_a_sibling(
    template: str, mode: Any, drawn: str, question: str, cut: bool
) -> None:
    texts = FakeTexts(template)
    end = "" if cut else texts.tokenizer.eos_token
    held = after_reply(texts, drawn, end)
    rest = [message("user", question)]
    made = next_prompt(texts, NONE, held, rest, mode)
    assert made.ids == texts.encode(made.text)
    if made.is_context:
        assert made.text == texts.render([*held.messages, *rest])
    elif mode == "follow":
        assert held.text + made.text in (
            texts.render([*held.messages, *rest]),
            texts.render([held.messages[0], message("assistant", drawn), *rest]),
        )
    else:
        assert question.strip() in made.text


@pytest.mark.parametrize("mode", ["follow", "append"])
def test_a_hostile_template_never_changes_tokens_that_are_held(mode: Any) -> None:
    texts = Texts(HOSTILE)
    held = after_reply(texts, "b", "")
    made = next_prompt(texts, NONE, held, [message("user", "c")], mode)
    assert made.is_context and made.text == "a3>"


def test_what_a_template_refuses_is_told() -> None:
    texts = FakeTexts(MISTRAL)
    held = after_reply(texts, "b", "</s>")
    with pytest.raises(SpmdError, match="roles must alternate"):
        next_prompt(texts, NONE, held, [message("assistant", "x")], "follow")
