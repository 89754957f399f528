"""Conversations of episodes: what is drawn stays, and the template writes the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.render.chat import Chat
from spmd_rl.data.render.turns import encode_turns
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.child.conversation import Conversation
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import TokenData
from tests.unit.data.chat_templates import CHATML, LLAMA, MISTRAL, PLAIN, QWEN, tokenizer_of
from tests.unit.hooks.cases import make_prompt

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "plain": PLAIN}
words = st.from_regex(r"\A[ab][ab ]{0,8}[ab]\Z")


class Engine:
    """An engine that draws the texts that it is given."""

    def __init__(self, tokenizer: Any, drawn: Sequence[str]) -> None:
        self.tokenizer, self.drawn = tokenizer, [*drawn]
        self.texts = EpisodeTexts(lambda: tokenizer)
        self.prompts: list[str] = []

    async def complete(
        self, transcript: Transcript, max_tokens: int | None, stop: Sequence[str] | None
    ) -> Turn:
        if transcript.place is None:
            transcript.place = TranscriptPlace(len(self.prompts), len(self.prompts), 1.0)
        past = [*transcript.context, *transcript.data.tokens]
        self.prompts.append(self.tokenizer.decode(past))
        (ids,) = self.tokenizer([self.drawn.pop(0)], add_special_tokens=False)["input_ids"]
        tokens, zeros = np.array(ids, np.int32), np.zeros(len(ids), np.int32)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        turn = Turn(TokenData(tokens, zeros.astype(np.float32), zeros), text)
        transcript.append(turn)
        return turn

    async def encode(self, text: str) -> list[int]:
        return self.texts.encode(text)

    async def decode(self, tokens: Any) -> str:
        return self.texts.decode(tokens)

    async def render(self, messages: Any, tools: Any, template_kwargs: Any) -> str:
        return self.texts.render(messages, tools, template_kwargs)


def played(name: str, said: list[str], asked: list[str], drawn: list[str], **kwargs: Any) -> Any:
    """Return an engine and the samples of a conversation in which the policy draws these texts."""
    tokenizer = tokenizer_of(TEMPLATES[name])
    first = [{"role": "user", "content": asked[0]}]
    text = tokenizer.apply_chat_template(
        first, tokenize=False, add_generation_prompt=True, **kwargs
    )
    (ids,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    chat = {"messages": first, "template_kwargs": kwargs}
    prompt = Prompt(0, np.array(ids, np.int32), text, chat=chat)
    engine: Any = Engine(tokenizer, drawn)

    async def play() -> list[Sample]:
        conversation = Conversation(prompt)
        for number in range(len(drawn)):
            if number:
                conversation.add("user", asked[number])
            await conversation.complete(engine)
            conversation.messages[-1]["content"] = said[number]
        return conversation.samples()

    return prompt, engine, asyncio.run(play())


def ended(name: str, text: str) -> str:
    """What a policy draws that has learned from this text."""
    thought = "<think>\n\n</think>\n\n" if name == "qwen" else ""
    begin = " " if name == "mistral" else ""
    return (
        begin
        + thought
        + text
        + ("\n" if name == "plain" else "")
        + tokenizer_of(TEMPLATES[name]).eos_token
    )


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_samples_are_what_supervised_training_learns(
    name: str, turns: list[tuple[str, str]]
) -> None:
    """The texts here do not merge with their neighbours, so that tokens can be compared."""
    asked, said = [[*column] for column in zip(*turns, strict=True)]
    prompt, engine, samples = played(name, said, asked, [ended(name, text) for text in said])
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    tokenizer = tokenizer_of(TEMPLATES[name])
    for number, text in enumerate(engine.prompts):
        assert text == tokenizer.apply_chat_template(
            messages[: 2 * number + 1], tokenize=False, add_generation_prompt=True
        ), "the policy is given what the template makes of the messages"
    chat = Chat("", messages, [], {})
    (expected,) = encode_turns([chat], "all", tokenizer, tokenizer.eos_token_id)
    assert len(samples) == len(expected)
    for sample, sequence in zip(samples, expected, strict=True):
        context = sample.context if len(sample.context) else prompt.tokens
        assert [*context, *sample.tokens] == sequence.tokens.tolist()
        assert sample.mask.tolist() == sequence.mask[len(context) :].tolist()


def test_drawn_tokens_stay_where_text_would_be_tokenised_in_another_way() -> None:
    drawn = ["\n\nab<|end|>", "b<|end|>"]
    prompt, _, (sample,) = played("chatml", ["\n\nab", "b"], ["a", "b"], drawn)
    tokenizer = tokenizer_of(CHATML)
    tokens = [*prompt.tokens, *sample.tokens]
    (again,) = tokenizer([tokenizer.decode(tokens)], add_special_tokens=False)["input_ids"]
    assert tokens != again
    learned = sample.tokens[sample.mask].tolist()
    first, second = tokenizer(drawn, add_special_tokens=False)["input_ids"]
    assert learned == first + second


def test_a_turn_that_was_cut_is_ended_by_the_template() -> None:
    _, _, (sample,) = played("chatml", ["a", "b"], ["a", "b"], ["a", "b<|end|>"])
    text = tokenizer_of(CHATML).decode(sample.tokens)
    assert text == "a<|end|>\n<|start|>user\nb<|end|>\n<|start|>assistant\nb<|end|>"
    assert tokenizer_of(CHATML).decode(sample.tokens[sample.mask]) == "ab<|end|>"


def test_a_prompt_that_the_template_rewrites_is_the_context_of_another_sample() -> None:
    """Its generation prompt has an empty thought, which the template later drops."""
    drawn = ["a<|end|>", "b<|end|>"]
    _, engine, samples = played("qwen", ["a", "b"], ["a", "b"], drawn, no_thinking=True)
    assert [len(sample.context) > 0 for sample in samples] == [False, True]
    decode = tokenizer_of(QWEN).decode
    assert [decode(sample.tokens) for sample in samples] == drawn
    assert decode(samples[1].context) == engine.prompts[1]
    assert engine.prompts[1].startswith("<|start|>user\na<|end|>\n<|start|>assistant\na<|end|>")


def test_a_prompt_without_messages() -> None:
    with pytest.raises(ValueError, match="needs a prompt with prompts.chat_template = true"):
        Conversation(make_prompt())


def test_texts_are_those_of_the_model_s_tokenizer() -> None:
    tokenizer = tokenizer_of(MISTRAL)
    texts = EpisodeTexts(lambda: tokenizer)
    user = {"role": "user", "content": "a"}
    assert texts.render([user]) == "<s>[INST] a [/INST]"
    refused = "messages: the chat template refuses this: roles must alternate user/assistant"
    with pytest.raises(SpmdError, match=refused):
        texts.render([user, user])
    with pytest.raises(SpmdError, match="messages"):
        texts.render([{"role": "user"}])
    assert texts.encode("<s>") == [tokenizer.bos_token_id]
    assert texts.decode([tokenizer.bos_token_id]) == "<s>"
    assert texts.decode([tokenizer.bos_token_id], skip_special_tokens=True) == ""
    assert texts.eos_ids[0] == tokenizer.eos_token_id
    assert texts.chat_template == MISTRAL
    with pytest.raises(ValueError, match="not negative"):
        texts.decode([-1])


@pytest.mark.parametrize("name", ["chatml", "qwen"])
def test_samples_have_the_messages_after_the_prompt(name: str) -> None:
    """Qwen3's template drops earlier thoughts, so there are two transcripts."""
    drawn = ["<think>a</think>one<|im_end|>", "<think>b</think>two<|im_end|>"]
    said = [text.removesuffix("<|im_end|>") for text in drawn]
    _, _, samples = played(name, said, ["ask", "more"], drawn)
    turns = [
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": said[1]},
    ]
    assert samples[-1].messages == turns and samples[-1].answer == said[1]
    if len(samples) > 1:
        assert samples[0].messages == turns[:1]
