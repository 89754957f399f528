"""Prompts of large files: read when drawn, in the same order, and the same after resuming."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.data.files import record_store
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.stream import EpochOrder
from spmd_rl.errors import DataError

Jsonl = Callable[..., str]
LINES = [json.dumps({"prompt": f"{i}?", "answer": str(i), "level": i % 3}) for i in range(12)]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a large one, of which three prompts are looked at."""
    monkeypatch.setattr(record_store, "SMALL_BYTES", 0)
    monkeypatch.setattr(record_store, "FIRST", 3)


@given(st.integers(1, 500), st.integers(0, 9), st.integers(0, 3))
def test_the_order_is_that_of_pythons_sort(num: int, seed: int, epoch: int) -> None:
    stream = random.Random(f"{seed}/{epoch}")
    keys = [stream.random() for _ in range(num)]
    order = EpochOrder(num, seed=seed, shuffle=True)
    found = [order.index_of(epoch * num + position) for position in range(num)]
    assert found == sorted(range(num), key=keys.__getitem__)


def test_orders_of_two_epochs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made, shuffled = [], EpochOrder._shuffled

    def count(order: EpochOrder, epoch: int) -> Any:
        made.append(epoch)
        return shuffled(order, epoch)

    monkeypatch.setattr(EpochOrder, "_shuffled", count)
    order = EpochOrder(5, seed=0, shuffle=True)
    for draw in (0, 7, 1, 8, 12, 9):
        order.index_of(draw)
    assert made == [0, 1, 2]


def test_a_large_file_is_drawn_as_a_small_one(
    jsonl: Jsonl, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(*LINES)
    small = Prompts(path, PromptConfig(), tokenizer)
    monkeypatch.setattr(record_store, "SMALL_RECORDS", 11)
    large = Prompts(path, PromptConfig(), tokenizer)
    assert len(large) == len(small) == 12
    for one, other in zip(small.take(30), large.take(30), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.replace(tokens=None) == other.replace(tokens=None)
    with pytest.raises(DataError, match="not those of the checkpoint"):
        large.restore(small.state())


@pytest.mark.usefixtures("large")
def test_only_what_is_drawn_is_tokenised(
    jsonl: Jsonl, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    call = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, text, **k: seen.extend(text) or call(self, text, **k),
    )
    prompts = Prompts(jsonl(*LINES), PromptConfig(), tokenizer)
    assert [text for text in seen if text.endswith("?")] == ["0?", "1?", "2?"]
    seen.clear()
    assert [prompt.text for prompt in prompts.take(4)] == seen


@pytest.mark.usefixtures("large")
def test_long_prompts_are_dropped_when_drawn(
    jsonl: Jsonl, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = PromptConfig(max_prompt_tokens=3)  # 10? and 11? have four tokens with BOS
    path = jsonl(*LINES)
    prompts, resumed = (Prompts(path, cfg, tokenizer) for _ in range(2))
    assert (prompts.num_dropped, capsys.readouterr().out) == (0, "")
    epoch = prompts.take(10)
    said = capsys.readouterr().out
    assert said == f"{path}: prompts that have more than 3 tokens are dropped when drawn\n"
    epoch += prompts.take(10)
    assert sorted(p.answer for p in epoch[:10]) == sorted(map(str, range(10)))
    assert prompts.num_dropped == 2
    assert capsys.readouterr().out == "", "it is said once"
    uids = [prompt.uid for prompt in epoch]
    assert uids == sorted({*uids})
    assert uids[-1] > 19, "the draws of dropped prompts have numbers too"
    prompts.give_back(epoch[4:6])
    resumed.restore(json.loads(json.dumps(prompts.state())))
    for one, other in zip(prompts.take(15), resumed.take(15), strict=True):
        assert (one.uid, one.text) == (other.uid, other.text)


@pytest.mark.usefixtures("large")
def test_all_prompts_too_long(jsonl: Jsonl, tokenizer: Any) -> None:
    prompts = Prompts(jsonl(*LINES), PromptConfig(max_prompt_tokens=2), tokenizer)
    with pytest.raises(DataError, match="all 12 prompts have more than 2 tokens"):
        prompts.take(5)


@pytest.mark.usefixtures("large")
def test_first_mistakes_are_found_at_the_start_and_others_when_drawn(
    jsonl: Jsonl, tokenizer: Any
) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:3: prompt: expected a string, got 3"):
        Prompts(jsonl(*LINES[:2], '{"prompt": 3, "answer": ""}'), PromptConfig(), tokenizer)
    prompts = Prompts(jsonl(*LINES[:5], "broken"), PromptConfig(), tokenizer)
    with pytest.raises(DataError, match=r"train\.jsonl:6: not valid JSON"):
        prompts.take(6)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("change", ["answer", "tokenizer", "slice"])
def test_changes_are_noticed_on_resume(jsonl: Jsonl, tokenizer: Any, change: str) -> None:
    path = jsonl(*LINES)
    state = Prompts(path, PromptConfig(), tokenizer).state()
    Prompts(path, PromptConfig(), tokenizer).restore(state)
    if change == "answer":
        jsonl(*LINES[:-1], LINES[-1].replace('"answer": "11"', '"answer": "12"'))
    elif change == "slice":
        path += "@[:11]"
    key = "answer" if change == "tokenizer" else "prompt"
    with pytest.raises(DataError, match="not those of the checkpoint"):
        Prompts(path, PromptConfig(prompt_key=key), tokenizer).restore(state)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        ("math", {"math": 1.0}),
        ({"math": 1, "code": 0.5, "other": None}, {"math": 1.0, "code": 0.5}),
        (None, {}),
        ("", {}),
    ],
)
def test_a_record_names_its_reward(
    jsonl: Jsonl, tokenizer: Any, value: Any, reward: dict[str, float]
) -> None:
    path = jsonl(json.dumps({"prompt": "x", "answer": "y", "grader": value, "level": 1}))
    cfg = PromptConfig(reward_key="grader")
    (prompt,) = Prompts(path, cfg, tokenizer).take(1)
    assert (prompt.reward, prompt.meta) == (reward, {"level": 1})
    state = Prompts(path, cfg, tokenizer).state()
    other = jsonl(json.dumps({"prompt": "x", "answer": "y", "grader": "new", "level": 1}))
    with pytest.raises(DataError, match="not those of the checkpoint"):
        Prompts(other, cfg, tokenizer).restore(state)


@pytest.mark.parametrize("value", [3, ["math"], {"math": "1"}, {"math": True}, {"math": 1e999}])
def test_a_reward_of_another_form_is_refused(jsonl: Jsonl, tokenizer: Any, value: Any) -> None:
    path = jsonl(json.dumps({"prompt": "x", "answer": "y", "grader": value}))
    with pytest.raises(DataError, match=r"train\.jsonl:1: grader: expected the name of a reward"):
        Prompts(path, PromptConfig(reward_key="grader"), tokenizer)
