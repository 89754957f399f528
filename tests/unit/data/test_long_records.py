"""Records that the context cannot hold and pairs of equal answers: refused, dropped or cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import ConfigError, DataError
from tests.unit.data.chat_templates import CHATML, tokenizer_of

CONTEXT = 40
REFUSED = "set prompts.too_long to"
USER, LONG = {"role": "user", "content": "q"}, {"role": "assistant", "content": "ab " * 40}
SHORT = {"role": "assistant", "content": "a"}
Jsonl = Callable[..., str]


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = tokenizer_of(CHATML)
    monkeypatch.setattr(made, "context", CONTEXT)
    return made


def answers(jsonl: Jsonl, *lengths: int) -> str:
    rows = [{"prompt": "q", "answer": "b" * length} for length in lengths]
    return jsonl(*map(json.dumps, rows))


def test_answers(jsonl: Jsonl, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = answers(jsonl, 3, 300, 2)
    with pytest.raises(DataError, match=rf"train.jsonl:2: prompt and answer have .*{REFUSED}"):
        SftPairs(path, PromptConfig(), tokenizer)
    dropped = SftPairs(path, PromptConfig(too_long="drop", shuffle=False), tokenizer)
    assert len(dropped) == 2
    assert dropped.metrics() == {"data/dropped": 1.0}
    said = capsys.readouterr().out
    assert "dropped 1 of 3 pairs, which do not fit the model's context" in said
    cut = SftPairs(path, PromptConfig(too_long="cut", shuffle=False), tokenizer)
    assert cut.metrics() == {}
    assert [len(one.tokens) < CONTEXT for one in cut.next(3)] == [True, False, True]
    (_, whole, _) = cut.next(3)
    assert len(whole.tokens) == CONTEXT
    assert whole.mask.any()
    assert tokenizer.eos_token_id not in whole.tokens, "a cut answer has no end to learn"
    said = capsys.readouterr().out
    assert f"1 of 3 sequences are cut at the model's context of {CONTEXT} tokens" in said


@pytest.mark.parametrize("too_long", ["drop", "cut"])
def test_prompts_that_leave_no_room_are_left_out(
    jsonl: Jsonl, tokenizer: Any, too_long: Any
) -> None:
    rows = [{"prompt": "b" * 300, "answer": "a"}, {"prompt": "q", "answer": "a"}]
    path = jsonl(*map(json.dumps, rows))
    assert len(SftPairs(path, PromptConfig(too_long=too_long), tokenizer)) == 1
    with pytest.raises(DataError, match="set prompts.max_prompt_tokens to drop long prompts"):
        Prompts(path, PromptConfig(), tokenizer)
    cfg = PromptConfig(too_long=too_long)
    if too_long == "drop":
        assert len(Prompts(path, cfg, tokenizer)) == 1
        return
    with pytest.raises(ConfigError, match=r"prompts.too_long = 'cut' is for answers to learn"):
        Prompts(path, cfg, tokenizer)


def test_conversations(jsonl: Jsonl, tokenizer: Any) -> None:
    rows = [[USER, SHORT, USER, LONG], [USER, LONG, USER, SHORT], [USER, SHORT]]
    path = jsonl(*(json.dumps({"messages": one}) for one in rows))
    given = {"chat_template": True, "prompt_key": "messages", "answer_key": "", "shuffle": False}
    with pytest.raises(DataError, match=REFUSED):
        SftPairs(path, PromptConfig(**given), tokenizer)
    assert len(SftPairs(path, PromptConfig(**given, too_long="drop"), tokenizer)) == 1
    cut = SftPairs(path, PromptConfig(**given, too_long="cut"), tokenizer)
    first, second, third = cut.next(3)
    assert len(first.tokens) == len(second.tokens) == CONTEXT > len(third.tokens)
    last = SftPairs(path, PromptConfig(**given, too_long="cut"), tokenizer, "last")
    assert len(last) == 2, "of the second, nothing is left to learn"


def test_pairs(jsonl: Jsonl, tokenizer: Any) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b" * 300},
        {"prompt": "q", "chosen": "c" * 300 + "a", "rejected": "c" * 300},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ]
    path = jsonl(*map(json.dumps, rows))
    for is_reward in (False, True):

        def pairs(too_long: Any, for_reward_model: bool = is_reward) -> PreferencePairs:
            cfg = PairConfig(too_long=too_long, shuffle=False)
            return PreferencePairs(path, cfg, tokenizer, for_reward_model=for_reward_model)

        with pytest.raises(DataError, match=REFUSED):
            pairs("refuse")
        assert len(pairs("drop")) == 1
        if is_reward:
            with pytest.raises(ConfigError, match=r"prompts.too_long = 'cut' would take away"):
                pairs("cut")
    cut = PreferencePairs(path, PairConfig(too_long="cut", shuffle=False), tokenizer)
    assert len(cut) == 2, "equal after the cut"
    assert len(cut.next(1)[0].rejected.tokens) == CONTEXT


@pytest.mark.parametrize("for_reward_model", [False, True])
@pytest.mark.parametrize("chat_template", [False, True])
def test_equal_answers_are_left_out_aloud(
    jsonl: Jsonl,
    tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
    for_reward_model: bool,
    chat_template: bool,
) -> None:
    rows = [{"prompt": "q", "chosen": "7", "rejected": one} for one in ("7", 7, "8")]
    path = jsonl(*map(json.dumps, rows))
    cfg = PairConfig(chat_template=chat_template, shuffle=False)
    made = PreferencePairs(path, cfg, tokenizer, for_reward_model=for_reward_model)
    assert len(made) == 1
    assert made.metrics() == {"data/dropped": 2.0}
    said = capsys.readouterr().out
    assert "dropped 2 of 3 preference pairs, which have two equal answers" in said
    with pytest.raises(DataError, match="all 2 preference pairs have two equal answers"):
        PreferencePairs(f"{path}@[:2]", cfg, tokenizer, for_reward_model=for_reward_model)
