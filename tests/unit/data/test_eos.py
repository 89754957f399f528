"""What ends a sample and a supervised answer, and what is said of it at the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spmd_rl.data.eos import eos_ids
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.sft import SftPairs
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
