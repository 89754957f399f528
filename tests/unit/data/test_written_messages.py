"""Messages that are written as text: read as messages, or refused, but never one user's words."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.sft import SftPairs, check_sft
from spmd_rl.errors import DataError
from tests.unit.data.chat_templates import CHATML, tokenizer_of
from tests.unit.data.whole_files import read_records

Jsonl = Callable[..., str]
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 5*6?"}]
SAID = {"role": "assistant", "content": "30"}
CHAT = PromptConfig(chat_template=True, prompt_key="messages")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_text_is_read_as_messages(
    tmp_path: Path, jsonl: Jsonl, kind: str, indent: int | None
) -> None:
    row = {"messages": json.dumps(ASKED, indent=indent) + "\n", "answer": "30"}
    path = jsonl(json.dumps(row))
    if kind == "csv":
        path = str(tmp_path / "train.csv")
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*row])
            writer.writeheader()
            writer.writerow(row)
    (prompt,) = Prompts(path, CHAT, tokenizer_of(CHATML)).take(1)
    (listed,) = Prompts(
        jsonl(json.dumps({"messages": ASKED, "answer": "30"}), name="list.jsonl"),
        CHAT,
        tokenizer_of(CHATML),
    ).take(1)
    assert (prompt.text, prompt.chat) == (listed.text, listed.chat)
    assert prompt.chat["messages"] == ASKED


def test_conversations_and_pairs_as_text(jsonl: Jsonl) -> None:
    tokenizer = tokenizer_of(CHATML)
    whole = [*ASKED, SAID]
    rows = [
        {
            "messages": dump(whole),
            "prompt": dump(ASKED),
            "chosen": dump(whole),
            "rejected": dump([SAID | {"content": "31"}]),
        }
        for dump in (json.dumps, lambda value: value)
    ]
    path = jsonl(*map(json.dumps, rows))
    cfg = PromptConfig(chat_template=True, prompt_key="messages", answer_key="")
    text, listed = SftPairs(path, cfg, tokenizer).all()
    assert text[0].tokens.tolist() == listed[0].tokens.tolist()
    text, listed = PreferencePairs(path, PairConfig(chat_template=True), tokenizer).all()
    for one, other in zip(text, listed, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert tokenizer.decode(text.chosen.tokens[text.chosen.mask]) == "30<|end|>"


@pytest.mark.parametrize(
    "text",
    [
        str(ASKED),  # as Python prints it, and so as pandas writes it into a .csv
        f"array({ASKED}, dtype=object)",
        str(ASKED).replace("}, {", "}\n {"),  # as numpy prints it
        json.dumps(ASKED)[:-9],
        json.dumps(ASKED[1]),
        json.dumps([ASKED[1], {"role": "user"}]),
        json.dumps([{"from": "human", "value": "What is 5*6?"}]),
        "[]",
    ],
)
def test_what_looks_like_messages_is_refused(text: str, jsonl: Jsonl) -> None:
    path = jsonl(json.dumps({"messages": text, "answer": "30"}))
    with pytest.raises(DataError, match=r"^\S*train\.jsonl:1: messages(\[\d\])?: "):
        Prompts(path, CHAT, tokenizer_of(CHATML))


@pytest.mark.parametrize(
    "text",
    [
        "What is 5*6?",
        "[1, 2, 3]",
        "[Alice] Hello!",
        '{"a": 1}',
        '[{"a": 1}, {"a": 2}]',
        '[{"from": "A", "to": "B"}]',
        f"{json.dumps(ASKED)} How many messages are this?",
        f"Count: {json.dumps(ASKED)}",
        "{'a': 1}",
        "",
    ],
)
def test_other_text_stays_what_a_user_says(text: str, jsonl: Jsonl) -> None:
    path = jsonl(json.dumps({"messages": text, "answer": "30"}))
    (prompt,) = Prompts(path, CHAT, tokenizer_of(CHATML)).take(1)
    assert prompt.chat["messages"] == [{"role": "user", "content": text}]


def test_messages_as_text_need_a_template_too(jsonl: Jsonl) -> None:
    path = jsonl(json.dumps({"prompt": json.dumps(ASKED), "answer": "30"}))
    with pytest.raises(DataError, match="a list of messages needs chat_template = true"):
        Prompts(path, PromptConfig(), tokenizer_of(CHATML))


@pytest.mark.parametrize("dump", [json.dumps, lambda value: value])
def test_the_answer_of_a_prompt_is_no_list_of_messages(jsonl: Jsonl, dump: Any) -> None:
    path = jsonl(json.dumps({"prompt": "q", "answer": dump([SAID])}))
    sentence = r"train\.jsonl:1: answer: the answer of a prompt is a text, and these are messages"
    with pytest.raises(DataError, match=sentence):
        SftPairs(path, PromptConfig(), tokenizer_of(CHATML))
    with pytest.raises(DataError, match=sentence):
        check_sft(read_records(path), PromptConfig(), "all")
