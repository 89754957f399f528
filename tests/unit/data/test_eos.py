"""Tokens that end samples and supervised answers, and the warnings about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spmd_rl.data.documents import DocumentConfig, Documents
from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.render.eos import eos_ids
from spmd_rl.data.render.tokenizer import beginning, begun_once
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import DataError
from spmd_rl.rollout.engine import SamplingConfig

Jsonl = Callable[..., str]
SAMPLING = SamplingConfig(max_tokens=7)
NO_END = (
    "this model has no end-of-text token, and neither sampling.stop nor sampling.stop_ids is set: "
    "every sample goes on "
)


@pytest.fixture
def path(jsonl: Jsonl) -> str:
    return jsonl(*(json.dumps({"prompt": "?" * num, "answer": "7"}) for num in range(1, 9)))


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("own", "config", "ids"),
    [
        (2, (2,), (2,)),
        (2, (), (2,)),
        (None, (3, 4), (3, 4)),
        (2, (3, 2), (2, 3)),
        (2, (3,), (2, 3)),
        (0, (2,), (0, 2)),
        (0, (), (0,)),
        (None, (0,), (0,)),
        (None, (), ()),
    ],
)
def test_supervised_answers_end_with_what_ends_samples(
    path: str,
    tokenizer: Any,
    own: int | None,
    config: tuple[int, ...],
    ids: tuple[int, ...],
) -> None:
    tokenizer.eos_token_id, tokenizer.config_eos_ids = own, config
    assert eos_ids(tokenizer) == ids
    if ids:
        assert {
            int(pair.tokens[-1]) for pair in SftPairs(path, PromptConfig(), tokenizer).next(8)
        } == {ids[0]}


def test_of_what_is_in_order_nothing_is_said(
    path: str, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for own, config in ((2, (2,)), (2, (3, 2)), (2, ()), (None, (3,))):
        tokenizer.eos_token_id, tokenizer.config_eos_ids = own, config
        Prompts(path, PromptConfig(), tokenizer, SAMPLING)
        SftPairs(path, PromptConfig(), tokenizer)
    assert said(capsys) == []


def test_other_ids_in_config_and_tokenizer(
    path: str, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.config_eos_ids = (0, 5)
    Prompts(path, PromptConfig(), tokenizer, SAMPLING)
    differ = "the model's config ends a text with token 0 or 5, its tokenizer with 2"
    assert said(capsys) == [f"{differ}: samples end with either"]
    SftPairs(path, PromptConfig(), tokenizer)
    assert said(capsys) == [f"{differ}: answers are learned with 2 as their last token"]
    Prompts(path, PromptConfig(), tokenizer, replace(SAMPLING, ignore_eos=True))
    Prompts(path, PromptConfig(), tokenizer)
    assert said(capsys) == []


def test_an_end_with_the_id_0_is_an_end(
    path: str, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.eos_token_id, tokenizer.config_eos_ids = 0, (2,)
    Prompts(path, PromptConfig(), tokenizer, SAMPLING)
    differ = "the model's config ends a text with token 2, its tokenizer with 0"
    assert said(capsys) == [f"{differ}: samples end with either"]
    tokenizer.config_eos_ids = (0,)
    Prompts(path, PromptConfig(), tokenizer, SAMPLING)
    assert said(capsys) == []


@pytest.mark.parametrize("end", [chr(2), chr(5)])
@pytest.mark.parametrize("answer", ["7{}", "7{}8", "{}"])
def test_an_answer_that_ends_early_is_refused(
    jsonl: Jsonl, tokenizer: Any, answer: str, end: str
) -> None:
    """An engine stops at any of the ends, so the rest could not be learned."""
    tokenizer.config_eos_ids = (2, 5)
    row = {"prompt": f"?{end}", "answer": answer.format(end)}
    path = jsonl(json.dumps(row))
    with pytest.raises(DataError, match=r"train\.jsonl:1: answer: this text holds .* take it out"):
        SftPairs(path, PromptConfig(), tokenizer)
    pair = jsonl(json.dumps({"prompt": "?", "chosen": "8", "rejected": answer.format(end)}))
    with pytest.raises(DataError, match=r"train\.jsonl:1: rejected: this text holds"):
        PreferencePairs(pair, PairConfig(), tokenizer)


def test_a_prompt_that_was_rendered_before_begins_once(jsonl: Jsonl, tokenizer: Any) -> None:
    begins = chr(1)
    texts = ["hi", f"{begins}hi", f"{begins}{begins}hi", f"h{begins}i", f"{begins}"]
    rows = [{"prompt": text, "answer": "7", "text": text} for text in texts]
    path = jsonl(*map(json.dumps, rows))
    cfg = PromptConfig(shuffle=False)
    expected = [[1, 104, 105]] * 3 + [[1, 104, 1, 105], [1]]
    assert [one.tokens.tolist() for one in Prompts(path, cfg, tokenizer).take(5)] == expected
    learned = SftPairs(path, cfg, tokenizer).next(5)
    assert [one.tokens.tolist() for one in learned] == [[*one, 55, 2] for one in expected]
    documents = Documents(path, DocumentConfig(max_tokens=9, shuffle=False), tokenizer)
    assert [one.tokens.tolist() for one in documents.one_pass()] == [[*one, 2] for one in expected]


@pytest.mark.parametrize(
    ("added", "beginning_ids"), [(([], []), []), (([1], []), [1]), (([1, 9], [2]), [1, 9])]
)
def test_what_a_tokenizer_puts_in_front(
    added: tuple[list[int], list[int]], beginning_ids: list[int]
) -> None:
    def tokenizer(text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        first, last = added if add_special_tokens else ([], [])
        return {"input_ids": [[*first, *map(ord, one), *last] for one in text]}

    assert beginning(tokenizer) == beginning_ids
    assert begun_once([*beginning_ids, *beginning_ids, 7], beginning_ids) == [*beginning_ids, 7]
    assert begun_once([7, 7], beginning_ids) == [7, 7]


def test_empty_answers_are_told(
    jsonl: Jsonl, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "?", "answer": answer} for answer in ("", "7", "")]
    path = jsonl(*map(json.dumps, rows))
    SftPairs(path, PromptConfig(), tokenizer)
    ends = "the model learns to end at once there"
    assert said(capsys) == [f"{path}: 2 of 3 answers are empty: {ends}"]
    Prompts(path, PromptConfig(), tokenizer)
    assert said(capsys) == [], "an answer to compare with may be empty"
    pair = jsonl(json.dumps({"prompt": "?", "chosen": "7", "rejected": ""}), name="pairs.jsonl")
    PreferencePairs(pair, PairConfig(), tokenizer)
    assert said(capsys) == [f"{pair}: 1 of 2 answers are empty: {ends}"]


def test_no_end_at_all(path: str, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer.eos_token_id, tokenizer.config_eos_ids = None, ()
    Prompts(path, PromptConfig(), tokenizer, SAMPLING)
    assert said(capsys) == [f"{NO_END}to sampling.max_tokens = 7"]
    for stops in ({"stop": ("x",)}, {"stop_ids": (3,)}, {"ignore_eos": True}):
        Prompts(path, PromptConfig(), tokenizer, replace(SAMPLING, **stops))
    assert said(capsys) == []


def test_samples_that_the_context_cuts_are_counted(
    path: str, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.context = 14  # prompts have 2 to 9 tokens with BOS
    Prompts(path, PromptConfig(), tokenizer, SAMPLING)
    told = "2 of 8 prompts with sampling.max_tokens = 7 exceed the model's context of 14"
    assert said(capsys) == [f"{path}: {told}: their samples are cut there"]
    tokenizer.context = 16
    Prompts(path, PromptConfig(), tokenizer, SAMPLING)
    assert said(capsys) == []
