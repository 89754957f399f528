"""Preference pairs: both answers behind one prompt, an exact resume, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.errors import DataError

ROWS = [{"prompt": f"q{i}", "chosen": f"yes{i}", "rejected": i} for i in range(5)]


@pytest.fixture
def path(jsonl: Callable[..., str]) -> str:
    return jsonl(*map(json.dumps, ROWS))


def text(tokens: Any) -> str:
    return "".join(chr(token) for token in tokens if token > 2)


def test_both_answers_follow_the_prompt(path: str, tokenizer: Any) -> None:
    pairs = PreferencePairs(path, PairConfig(shuffle=False), tokenizer).next(5)
    for i, (chosen, rejected) in enumerate(pairs):
        assert (text(chosen.tokens), text(rejected.tokens)) == (f"q{i}yes{i}", f"q{i}{i}")
        assert text(chosen.tokens[chosen.mask]) == f"yes{i}"
        assert text(rejected.tokens[rejected.mask]) == str(i)
        assert chosen.tokens[-1] == rejected.tokens[-1] == tokenizer.eos_token_id


def test_other_keys_chat_and_slices(jsonl: Callable[..., str], tokenizer: Any) -> None:
    chat = {
        "question": [{"role": "user", "content": "q"}],
        "good": [{"role": "assistant", "content": "a"}],
        "bad": "b",
    }
    cfg = PairConfig(
        prompt_key="question", chosen_key="good", rejected_key="bad", chat_template=True
    )
    path = jsonl("{}", json.dumps(chat))
    ((chosen, rejected),) = PreferencePairs(f"{path}@[1:]", cfg, tokenizer).next(1)
    assert text(chosen.tokens) == "<user>q<assistant>a"
    assert text(rejected.tokens) == "<user>q<assistant>b"


def test_parquet_holds_the_same_pairs(path: str, tokenizer: Any, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [row | {"rejected": str(row["rejected"])} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    read = [
        [
            pair.rejected.tokens.tolist()
            for pair in PreferencePairs(file, PairConfig(), tokenizer).next(7)
        ]
        for file in (path, str(tmp_path / "pairs.parquet"))
    ]
    assert read[0] == read[1]


def test_a_resumed_stream_goes_on_exactly(path: str, tokenizer: Any) -> None:
    whole = PreferencePairs(path, PairConfig(), tokenizer)
    whole.next(3)
    state = json.loads(json.dumps(whole.state()))
    resumed = PreferencePairs(path, PairConfig(), tokenizer)
    resumed.restore(state)
    for pair, other in zip(whole.next(6), resumed.next(6), strict=True):
        assert text(pair.chosen.tokens) == text(other.chosen.tokens)


def test_changed_pairs_are_refused(path: str, jsonl: Callable[..., str], tokenizer: Any) -> None:
    state = PreferencePairs(path, PairConfig(), tokenizer).state()
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    other = jsonl(*map(json.dumps, swapped), name="other.jsonl")
    with pytest.raises(DataError, match="preference pairs are not those of the checkpoint"):
        PreferencePairs(other, PairConfig(), tokenizer).restore(state)


def test_long_prompts_are_dropped(path: str, tokenizer: Any) -> None:
    rows = PreferencePairs(path, PairConfig(max_prompt_tokens=3), tokenizer)
    assert (len(rows), rows.num_dropped) == (5, 0)
    with pytest.raises(
        DataError, match="all 5 preference pairs have a prompt of more than 2 tokens"
    ):
        PreferencePairs(path, PairConfig(max_prompt_tokens=2), tokenizer)


@pytest.mark.parametrize(
    "chosen",
    [
        None,
        [],
        [{"role": "user", "content": "x"}],
        [{"role": "user", "content": "q"}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "other"}, {"role": "assistant", "content": "x"}],
        [{"role": "assistant", "content": "x"}] * 2,
        [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
    ],
)
def test_what_is_no_answer_is_refused(
    chosen: Any, jsonl: Callable[..., str], tokenizer: Any
) -> None:
    path = jsonl(json.dumps({"prompt": "q", "chosen": chosen, "rejected": "b"}))
    with pytest.raises(DataError, match="chosen"):
        PreferencePairs(path, PairConfig(), tokenizer)


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q", "name": None}]])
def test_the_prompt_may_stand_again_before_an_answer(
    prompt: Any, jsonl: Callable[..., str], tokenizer: Any
) -> None:
    asked = {"role": "user", "content": "q"}
    row = {"prompt": prompt, "rejected": [asked, {"role": "assistant", "content": "b"}]}
    row["chosen"] = [asked, {"role": "assistant", "content": "a"}]
    path = jsonl(json.dumps(row))
    cfg = PairConfig(chat_template=True)
    ((chosen, rejected),) = PreferencePairs(path, cfg, tokenizer).next(1)
    assert text(chosen.tokens) == "<user>q<assistant>a"
    assert text(rejected.tokens) == "<user>q<assistant>b"
