"""Conversations as sequences: what is learned, what an engine would be given, and siblings."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.prompts import PromptConfig
from spmd_rl.data.render.chat import Chat
from spmd_rl.data.render.turns import Learn, encode_turns
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.sft_pair import SftPair
from tests.unit.data.chat_templates import (
    CHATML,
    GLM,
    LLAMA,
    MISTRAL,
    PLAIN,
    QWEN,
    tokenizer_of,
)

Messages = list[dict[str, Any]]
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "plain": PLAIN,
    "glm": GLM,
}

# line breaks and spaces at the edges are where tokens of two pieces would merge
texts = st.text("ab\n \té字", max_size=12)
words = st.from_regex(r"\A[ab][ab ]{0,8}[ab]\Z")


@st.composite
def conversations(draw: st.DrawFn, contents: st.SearchStrategy[str] = texts) -> Messages:
    messages: Messages = []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(contents)})
        messages.append({"role": "assistant", "content": draw(contents)})
        if draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(contents)
    for message in messages[1::2]:
        if draw(st.booleans()):
            message["weight"] = draw(st.sampled_from([0, 1]))
    if not any(message.get("weight", 1) for message in messages[1::2]):
        del messages[-1]["weight"]
    return messages


def encode(messages: Messages, name: str, learn: Learn = "all", **kwargs: Any) -> list[SftPair]:
    tokenizer = tokenizer_of(TEMPLATES[name])
    chat = Chat("f:1: messages", messages, [], kwargs)
    (sequences,) = encode_turns([chat], learn, tokenizer, tokenizer.eos_token_id)
    return sequences


def answer(message: dict[str, Any], name: str) -> str:
    """The text that an engine would have drawn, by the words of the template alone."""
    content = message["content"]
    if name == "chatml":
        return f"{content}<|end|>"
    if name == "llama":
        return f"{content.strip()}<|eot|>"
    if name == "qwen":
        return f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n{content}<|end|>"
    return f" {content}</s>" if name == "mistral" else f"{content}\n</s>"


def rendered(messages: Messages, name: str, generation_prompt: bool = True) -> str:
    """The conversation by the template."""
    plain = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    text: str = tokenizer_of(TEMPLATES[name]).apply_chat_template(
        plain, tokenize=False, add_generation_prompt=generation_prompt
    )
    return text


def runs(sequence: SftPair) -> list[tuple[int, int]]:
    """Where stretches of learned tokens begin and end."""
    found, start = [], 0
    for learned, group in groupby(sequence.mask.tolist()):
        stop = start + len([*group])
        found += [(start, stop)] if learned else []
        start = stop
    return found


def check(messages: Messages, sequences: list[SftPair], name: str) -> None:
    """Each learned turn once, after the prompt of an engine, and nothing else is learned."""
    tokenizer = tokenizer_of(TEMPLATES[name])
    turns = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight", 1)
    ]
    previous = ""
    for sequence in sequences:
        for number_in_sequence, (start, stop) in enumerate(runs(sequence)):
            number, tokens = turns.pop(0), sequence.tokens
            prompt = rendered(messages[:number], name)
            goes_on = bool(previous) and prompt.startswith(previous)
            assert goes_on == (number_in_sequence > 0), "another sequence only where it is needed"
            if number_in_sequence == 0:
                (whole,) = tokenizer([prompt], add_special_tokens=False)["input_ids"]
                assert tokens[:start].tolist() == whole
            assert tokenizer.decode(tokens[:start]) == prompt
            said = tokenizer.decode(tokens[start:stop])
            assert said == answer(messages[number], name)
            (drawn,) = tokenizer([said], add_special_tokens=False)["input_ids"]
            assert tokens[start:stop].tolist() == drawn
            previous = prompt + said
        assert len(sequence.tokens) == stop, "nothing follows the last answer"
    assert not turns


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "glm"])
@settings(max_examples=60)
@given(conversations())
def test_each_turn_is_learned_after_the_prompt_of_an_engine(name: str, messages: Messages) -> None:
    check(messages, encode(messages, name), name)


@pytest.mark.parametrize("fault", ["late", "early", "retokenised", "one sequence"])
def test_the_check_finds_a_fault(fault: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "\n\nb"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    name = "qwen" if fault == "one sequence" else "chatml"
    good = encode(messages, name)
    check(messages, good, name)
    first = good[0]
    if fault == "retokenised":
        tokenizer = tokenizer_of(CHATML)
        (tokens,) = tokenizer([tokenizer.decode(first.tokens)], add_special_tokens=False)[
            "input_ids"
        ]
        assert len(tokens) < len(first.tokens), "line breaks of prompt and answer merge"
        mask = np.isin(np.arange(len(tokens)), np.flatnonzero(first.mask))
        bad = [SftPair(np.array(tokens, np.int32), mask)]
    elif fault == "one sequence":
        tokens, mask, _ = zip(*good, strict=True)
        bad = [SftPair(np.concatenate(tokens), np.concatenate(mask))]
    else:
        bad = [first._replace(mask=np.roll(first.mask, 1 if fault == "late" else -1))]
    with pytest.raises(AssertionError):
        check(messages, bad, name)


@settings(max_examples=60)
@given(conversations(words))
def test_the_mask_of_transformers_is_the_same(messages: Messages) -> None:
    """Its mask is of the whole text, tokenised at once, so texts here do not merge with others."""
    plain = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    (ours,) = encode(plain, "chatml")
    theirs = tokenizer_of(CHATML).apply_chat_template(
        plain, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = theirs["input_ids"], theirs["assistant_masks"]
    assert ours.tokens.tolist() == tokens[:-1], "all but the line break after the last turn"
    assert ours.mask.tolist() == [bool(one) for one in mask[:-1]]


@given(words, words)
@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_one_turn_is_a_pair_of_prompt_and_answer(
    tmp_path_factory: pytest.TempPathFactory, name: str, question: str, said: str
) -> None:
    user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": said}
    path = tmp_path_factory.getbasetemp() / "train.jsonl"
    path.write_text(
        json.dumps({"prompt": [user], "answer": said, "messages": [user, assistant]}) + "\n"
    )
    tokenizer = tokenizer_of(TEMPLATES[name])
    pair_cfg = PromptConfig(chat_template=True)
    chat_cfg = PromptConfig(chat_template=True, prompt_key="messages", answer_key="")
    (pair,) = SftPairs(str(path), pair_cfg, tokenizer).next(1)
    (turn,) = SftPairs(str(path), chat_cfg, tokenizer).next(1)
    assert pair.tokens.tolist() == turn.tokens.tolist()
    assert pair.mask.tolist() == turn.mask.tolist()


def talk(*contents: str) -> Messages:
    roles = ["user", "assistant"] * len(contents)
    return [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]


def test_only_the_last_turn_and_weights() -> None:
    def learned(messages: Messages, learn: Learn) -> list[str]:
        tokenizer = tokenizer_of(CHATML)
        (one,) = encode(messages, "chatml", learn)
        return [tokenizer.decode(one.tokens[start:stop]) for start, stop in runs(one)]

    messages = talk("q", "a", "r", "b", "s", "c")
    assert learned(messages, "last") == ["c<|end|>"]
    messages[1]["weight"] = 1
    assert learned(messages, "last") == ["a<|end|>", "c<|end|>"]
    messages[5]["weight"] = 0
    assert learned(messages, "all") == ["a<|end|>", "b<|end|>"]
    messages[3]["weight"] = 0.5
    with pytest.raises(DataError, match=r"f:1: messages\[3\].weight: expected 0 or 1, got 0.5"):
        learned(messages, "all")
    with pytest.raises(DataError, match="no assistant message to learn"):
        learned(talk("q"), "all")


def test_thinking_makes_siblings_and_tool_results_do_not() -> None:
    assert len(encode(talk("q", "a", "r", "b", "s", "c"), "qwen")) == 3
    tools = talk("q", "a")
    tools += [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
    assert len(encode(tools, "qwen")) == 1
    assert len(encode(talk("q", "a"), "qwen", no_thinking=True)) == 1


def test_tool_calls_are_learned() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    (one,) = encode(messages, "chatml")
    assert said(one, "chatml") == [
        '<call>{"name": "add", "arguments": {"a": 1}}<|end|>',
        "It is 2.<|end|>",
    ]


def said(sequence: SftPair, name: str) -> list[str]:
    """The stretches of a sequence that are learned, as texts."""
    return [
        tokenizer_of(TEMPLATES[name]).decode(sequence.tokens[start:stop])
        for start, stop in runs(sequence)
    ]


def test_a_turn_ends_at_the_marker_with_which_the_next_message_begins() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = talk("q", " a ", "r")
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "two"}]
    (whole,) = encode(messages, "glm")
    called = '<call>{"name": "add", "arguments": {"a": 1}}<|head|>'
    begin = "\n<think></think>\n"
    assert said(whole, "glm") == [f"{begin}a<|start|>", f"{begin}{called}", f"{begin}two</s>"]
    text = tokenizer_of(GLM).decode(whole.tokens)
    assert text == rendered(messages, "glm", generation_prompt=False) + "</s>"
    messages[1]["weight"] = messages[5]["weight"] = 0
    (alone,) = encode(messages, "glm")
    assert said(alone, "glm") == [f"{begin}{called}"]


def test_the_marker_is_found_after_a_turn_whose_thought_is_hidden_later() -> None:
    messages = talk("q", "a", "r", "b")
    messages[1]["reasoning_content"] = "because"
    first, second = encode(messages, "glm")
    assert said(first, "glm") == ["\n<think>because</think>\na<|start|>"]
    assert said(second, "glm") == ["\n<think></think>\nb</s>"]


@pytest.mark.parametrize("ends", ["<|end|></s>", "</s><|end|>"])
def test_an_answer_ends_at_the_first_end_of_text_token(ends: str) -> None:
    """Of several with which the template ends a turn, an engine stops at the first."""
    tokenizer = tokenizer_of(CHATML)
    first, second = (tokenizer.convert_tokens_to_ids(end) for end in ("<|end|>", "</s>"))
    tokenizer.config_eos_ids = (first, second)
    tokenizer.chat_template = CHATML.replace("'<|end|>' }}{% endgen", f"'{ends}' }}}}{{% endgen")
    try:
        (one,) = encode(talk("q", "a", "r", "c"), "chatml")
    finally:
        tokenizer.chat_template, tokenizer.config_eos_ids = CHATML, (first,)
    assert said(one, "chatml") == [
        f"a{ends[: ends.index('>') + 1]}",
        f"c{ends[: ends.index('>') + 1]}",
    ]
    assert f"a{ends}\n<|start|>user" in tokenizer.decode(one.tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a<|end|>b"},
        {"content": "a<|end|>"},
        {"content": "a", "reasoning_content": "<|end|>"},
        {"content": "", "tool_calls": [{"name": "f", "arguments": {"a": ["<|end|>"]}}]},
    ],
)
def test_words_after_an_end_of_text_token_are_not_cut_silently(fields: dict[str, Any]) -> None:
    messages = [*talk("<|end|>", "b", "q"), {"role": "assistant"} | fields]
    with pytest.raises(DataError, match=r"^f:1: messages\[3\]: this text holds '<\|end\|>', which"):
        encode(messages, "qwen")
    messages[-1]["weight"] = 0
    assert encode(messages, "chatml"), "what is not learned may hold it, and so may a question"


def test_a_conversation_that_begins_with_the_assistant() -> None:
    messages = talk("hello", "hi", "what?", "that")
    messages = [{"role": "assistant", "content": "Hello!"}, *messages]
    with pytest.raises(DataError, match=r"^f:1: messages\[0\]: the conversation begins with the"):
        encode(messages, "chatml")
    messages[0]["weight"] = 0
    (one,) = encode(messages, "chatml")
    assert len(runs(one)) == 2
    assert encode([{"role": "system", "content": "s"}, *messages], "chatml")


def test_a_turn_that_is_no_continuation_is_refused(jsonl: Any) -> None:
    messages = talk("q", "a")
    tokenizer = tokenizer_of(QWEN)
    path = jsonl(json.dumps({"messages": messages}))
    kwargs = {"chat_template": True, "prompt_key": "messages", "answer_key": ""}
    cut = QWEN.replace("'<|start|>assistant\n'", "'<|start|>assistant\n<think>now'")
    tokenizer.chat_template = cut
    try:
        with pytest.raises(DataError, match=r"train.jsonl:1: messages\[1\]: .* weight 0"):
            SftPairs(path, PromptConfig(**kwargs), tokenizer)
    finally:
        tokenizer.chat_template = QWEN


def test_records_and_sequences_of_a_stream(jsonl: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": talk("q", "a", "r", "b")}, {"messages": talk("q", "a")}]
    path = jsonl(*map(json.dumps, rows))
    cfg = PromptConfig(chat_template=True, prompt_key="messages", answer_key="", shuffle=False)
    stream = SftPairs(path, cfg, tokenizer_of(QWEN))
    assert (len(stream), [len(stream.next(1)) for _ in range(3)]) == (2, [2, 1, 2])
    assert "So 1 of 2 conversations become 2 sequences." in capsys.readouterr().out
    other = SftPairs(path, cfg, tokenizer_of(QWEN))
    other.restore(stream.state())
    assert len(other.next(1)) == 1
    with pytest.raises(DataError, match="not those of the checkpoint"):
        SftPairs(path, cfg, tokenizer_of(QWEN), "last").restore(stream.state())
    short = PromptConfig(**{**vars(cfg), "max_prompt_tokens": 20})
    dropped = SftPairs(path, short, tokenizer_of(QWEN))
    assert (len(dropped), dropped.num_dropped) == (1, 1)


def test_conversations_need_a_template(jsonl: Any) -> None:
    path = jsonl(json.dumps({"messages": "q"}))
    with pytest.raises(ConfigError, match=r"prompts.chat_template = true to learn"):
        SftPairs(path, PromptConfig(prompt_key="messages", answer_key=""), tokenizer_of(CHATML))
