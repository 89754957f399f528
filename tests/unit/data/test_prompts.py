"""Prompts and pairs: order, tokens, filter, and a position that can be saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.sft import SftPairs
from spmd_rl.data.stream import EpochOrder
from spmd_rl.errors import ConfigError, DataError, SpmdError

Jsonl = Callable[..., str]


def lines(num: int, **extra: Any) -> list[str]:
    return [json.dumps({"prompt": f"{i}?", "answer": str(i), **extra}) for i in range(num)]


def drawn(order: EpochOrder, num: int) -> list[int]:
    return [order.next() for _ in range(num)]


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 130))
def test_order_depends_on_seed_epoch_and_position_alone(num: int, seed: int, start: int) -> None:
    whole, late = EpochOrder(num, seed=seed, shuffle=True), EpochOrder(num, seed=seed, shuffle=True)
    late.num_drawn = start
    assert drawn(whole, start + 50)[start:] == drawn(late, 50)


@given(st.integers(1, 40), st.integers(0, 5))
def test_every_epoch_draws_each_record_once(num: int, seed: int) -> None:
    order = EpochOrder(num, seed=seed, shuffle=True)
    assert all(sorted(drawn(order, num)) == list(range(num)) for _ in range(3))


def test_epochs_and_seeds_differ_and_the_order_never_changes() -> None:
    order = EpochOrder(8, seed=0, shuffle=True)
    epochs = [drawn(order, 8), drawn(order, 8), drawn(EpochOrder(8, seed=1, shuffle=True), 8)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] == [0, 3, 7, 4, 1, 5, 2, 6]  # as it was when this test was written


def test_without_shuffling_the_files_order() -> None:
    assert drawn(EpochOrder(3, seed=0, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_uids_number_the_draws(jsonl: Jsonl, tokenizer: Any) -> None:
    prompts = Prompts(jsonl(*lines(3)), PromptConfig(), tokenizer)
    got = prompts.take(2) + prompts.take(5)
    assert [prompt.uid for prompt in got] == list(range(7))
    assert sorted(prompt.answer for prompt in got[:3]) == ["0", "1", "2"]
    assert len(prompts) == 3


def test_a_prompt_carries_text_tokens_source_and_the_rest(jsonl: Jsonl, tokenizer: Any) -> None:
    path = jsonl(*lines(1, level=3), name="sums.jsonl")
    (prompt,) = Prompts(path, PromptConfig(), tokenizer).take(1)
    assert (prompt.text, prompt.answer, prompt.source, prompt.meta) == (
        "0?",
        "0",
        "sums",
        {"level": 3},
    )
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == [1, ord("0"), ord("?")]


@pytest.mark.parametrize(
    "value", ["18446744073709551616", "-9223372036854775809", '{"a": [1e400, "\\ud800"]}']
)
def test_a_value_that_cannot_travel_is_named(jsonl: Jsonl, tokenizer: Any, value: str) -> None:
    path = jsonl(*lines(2), f'{{"prompt": "p", "answer": {2**70}, "id": {value}}}')
    with pytest.raises(
        DataError, match=r"train.jsonl:3: id: this value cannot be sent to another process: "
    ):
        Prompts(path, PromptConfig(), tokenizer)
    assert len(Prompts(f"{path}@[:2]", PromptConfig(), tokenizer)) == 2


def test_the_largest_numbers_that_travel(jsonl: Jsonl, tokenizer: Any) -> None:
    prompts = Prompts(jsonl(*lines(1, id=2**64 - 1, least=-(2**63))), PromptConfig(), tokenizer)
    assert prompts.take(1)[0].meta == {"id": 2**64 - 1, "least": -(2**63)}


def test_chat_template(jsonl: Jsonl, tokenizer: Any) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl(
        json.dumps({"prompt": turns, "answer": "a"}), json.dumps({"prompt": "u", "answer": "a"})
    )
    cfg = PromptConfig(chat_template=True, shuffle=False, template_kwargs={"thinking": False})
    one, other = Prompts(path, cfg, tokenizer).take(2)
    assert one.text == "<system>s<user>u<assistant>[thinking=False]"
    assert other.text == "<user>u<assistant>[thinking=False]"
    assert one.tokens[0] == ord("<")  # the template's own tokens only, no second BOS


def test_chat_mistakes(jsonl: Jsonl, tokenizer: Any) -> None:
    messages = jsonl(json.dumps({"prompt": [{"role": "user"}], "answer": "a"}))
    with pytest.raises(
        DataError, match=r"train.jsonl:1: prompt: a list of messages needs chat_template = true"
    ):
        Prompts(messages, PromptConfig(), tokenizer)
    with pytest.raises(DataError, match="a message with 'role' and 'content'"):
        Prompts(messages, PromptConfig(chat_template=True), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Prompts(messages, PromptConfig(chat_template=True), tokenizer)


def test_long_prompts_are_dropped_and_counted(
    jsonl: Jsonl, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(*lines(12))  # 10? and 11? have four tokens with BOS
    prompts = Prompts(path, PromptConfig(max_prompt_tokens=3), tokenizer)
    assert (len(prompts), prompts.num_dropped) == (10, 2)
    assert "dropped 2 of 12 prompts, which have more than 3 tokens" in capsys.readouterr().out
    assert len(Prompts(path, PromptConfig(max_prompt_tokens=4), tokenizer)) == 12
    assert capsys.readouterr().out == ""
    with pytest.raises(DataError, match="all 12 prompts have more than 2 tokens"):
        Prompts(path, PromptConfig(max_prompt_tokens=2), tokenizer)


def test_a_prompt_leaves_room_for_its_answer(jsonl: Jsonl, tokenizer: Any) -> None:
    path, tokenizer.context = jsonl(*lines(12)), 4
    with pytest.raises(
        DataError,
        match=r"train.jsonl:11: prompt: the prompt has 4 tokens, but the model's context of 4",
    ):
        Prompts(path, PromptConfig(), tokenizer)
    assert len(Prompts(path, PromptConfig(max_prompt_tokens=3), tokenizer)) == 10
    tokenizer.context = 5
    assert len(Prompts(path, PromptConfig(), tokenizer)) == 12


def test_a_field_of_the_wrong_kind_is_named(jsonl: Jsonl, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"train.jsonl:2: answer: no such key"):
        Prompts(jsonl(*lines(1), '{"prompt": "x"}'), PromptConfig(), tokenizer)
    with pytest.raises(DataError, match=r"train.jsonl:1: prompt: expected a string, got None"):
        Prompts(jsonl('{"prompt": null, "answer": "a"}'), PromptConfig(), tokenizer)
    with pytest.raises(DataError, match=r"train.jsonl:1: prompt: half of a surrogate pair"):
        Prompts(jsonl(r'{"prompt": "x\ud800", "answer": "a"}'), PromptConfig(), tokenizer)
    assert (
        Prompts(jsonl('{"prompt": "x"}'), PromptConfig(answer_key=""), tokenizer).take(1)[0].answer
        == ""
    )


def test_a_prompt_that_is_a_number_is_refused(jsonl: Jsonl, tokenizer: Any) -> None:
    path = jsonl(*lines(1), '{"prompt": 12, "answer": "a"}')
    for stream in (Prompts, SftPairs):
        with pytest.raises(DataError, match=r"train.jsonl:2: prompt: expected a string, got 12$"):
            stream(path, PromptConfig(), tokenizer)
    path = jsonl('{"prompt": [{"role": "user", "content": 12}], "answer": "a"}')
    with pytest.raises(
        DataError,
        match=r"train.jsonl:1: prompt\[0\].content: expected a text or a list of text parts, got",
    ):
        Prompts(path, PromptConfig(chat_template=True), tokenizer)


def test_an_answer_that_is_a_number_is_its_text_and_this_is_said(
    jsonl: Jsonl, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(*lines(2), '{"prompt": "x", "answer": 42}', '{"prompt": "y", "answer": 0.5}')
    said = f"{path}: 2 of 4 answers are numbers: they are used as text, such as '42'\n"
    prompts = Prompts(path, PromptConfig(shuffle=False), tokenizer)
    assert capsys.readouterr().out == said
    assert [prompt.answer for prompt in prompts.take(4)] == ["0", "1", "42", "0.5"]
    pairs = SftPairs(path, PromptConfig(shuffle=False), tokenizer)
    assert capsys.readouterr().out == said
    assert pairs.next(4)[2].tokens.tolist() == [1, ord("x"), ord("4"), ord("2"), 2]
    Prompts(f"{path}@[:2]", PromptConfig(), tokenizer)
    assert capsys.readouterr().out == ""
    with pytest.raises(
        DataError, match=r"train.jsonl:1: answer: expected a string or a finite number, got True"
    ):
        Prompts(jsonl('{"prompt": "x", "answer": true}'), PromptConfig(), tokenizer)


def test_an_empty_prompt_is_refused(jsonl: Jsonl, tokenizer: Any) -> None:
    empty = json.dumps({"prompt": [{"role": "user", "content": ""}], "answer": "a"})
    tokenizer.apply_chat_template = lambda *_, **__: ""
    with pytest.raises(DataError, match="the prompt is empty"):
        Prompts(jsonl(empty), PromptConfig(chat_template=True), tokenizer)


def test_a_saved_position_continues_and_knows_its_data(jsonl: Jsonl, tokenizer: Any) -> None:
    path = jsonl(*lines(5))
    first, second = (
        Prompts(path, PromptConfig(), tokenizer),
        Prompts(path, PromptConfig(), tokenizer),
    )
    first.take(7)
    second.restore(json.loads(json.dumps(first.state())))
    assert [(p.uid, p.text) for p in first.take(9)] == [(p.uid, p.text) for p in second.take(9)]
    with pytest.raises(
        DataError,
        match=r"train.jsonl@\[:4\]: the prompts are not those of the checkpoint.*--run.name",
    ):
        Prompts(path + "@[:4]", PromptConfig(), tokenizer).restore(first.state())
    with pytest.raises(DataError, match="not those of the checkpoint"):
        Prompts(jsonl(*lines(5, level=3)), PromptConfig(), tokenizer).restore(first.state())


def test_what_is_given_back_is_taken_first_in_order_of_uids(jsonl: Jsonl, tokenizer: Any) -> None:
    path = jsonl(*lines(5))
    prompts, resumed = (Prompts(path, PromptConfig(), tokenizer) for _ in range(2))
    taken = prompts.take(8)
    prompts.give_back([taken[6], taken[2]])
    prompts.give_back([taken[4]])
    resumed.restore(json.loads(json.dumps(prompts.state())))
    expected = [(p.uid, p.text) for p in (taken[2], taken[4], taken[6])]
    for source in (prompts, resumed):
        assert [(p.uid, p.text) for p in source.take(2) + source.take(1)] == expected
        assert [p.uid for p in source.take(2)] == [8, 9]


@pytest.mark.parametrize("uids", [[0], [3], [-1], [1, 1]])
def test_only_what_is_out_can_be_given_back(jsonl: Jsonl, tokenizer: Any, uids: list[int]) -> None:
    prompts = Prompts(jsonl(*lines(2)), PromptConfig(), tokenizer)
    taken = prompts.take(3)
    prompts.give_back(taken[:1])
    with pytest.raises(SpmdError, match=f"prompt {uids[0]} is given back, but it is not out"):
        prompts.give_back([taken[0].replace(uid=uid) for uid in uids])
    assert [prompt.uid for prompt in prompts.take(2)] == [0, 3]


def test_pairs_learn_the_answer_and_the_end(jsonl: Jsonl, tokenizer: Any) -> None:
    (pair,) = SftPairs(jsonl(*lines(1)), PromptConfig(), tokenizer).next(1)
    assert pair.tokens.tolist() == [1, ord("0"), ord("?"), ord("0"), 2]
    assert pair.mask.tolist() == [False, False, False, True, True]


def test_pairs_position_and_mistakes(jsonl: Jsonl, tokenizer: Any) -> None:
    path = jsonl(*lines(4))
    one, other = (
        SftPairs(path, PromptConfig(), tokenizer),
        SftPairs(path, PromptConfig(), tokenizer),
    )
    one.next(3)
    other.restore(one.state())
    assert [p.tokens.tolist() for p in one.next(4)] == [p.tokens.tolist() for p in other.next(4)]
    with pytest.raises(DataError, match="not those of the checkpoint"):
        SftPairs(jsonl(*reversed(lines(4))), PromptConfig(), tokenizer).restore(one.state())
    with pytest.raises(ConfigError, match="answer_key"):
        SftPairs(path, PromptConfig(answer_key=""), tokenizer)
    tokenizer.context = 5
    assert len(SftPairs(path, PromptConfig(), tokenizer)) == 4
    tokenizer.context = 4
    with pytest.raises(
        DataError,
        match=r"train.jsonl:1: prompt and answer have 5 tokens, but the model's context is 4",
    ):
        SftPairs(path, PromptConfig(), tokenizer)
    tokenizer.eos_token_id, tokenizer.config_eos_ids = None, ()
    with pytest.raises(ConfigError, match="no end-of-text token"):
        SftPairs(path, PromptConfig(), tokenizer)


def test_a_key_may_name_a_field_of_an_object(jsonl: Jsonl, tokenizer: Any) -> None:
    """The form of verl: the answer is `reward_model.ground_truth`."""
    row = {"prompt": "q", "reward_model": {"ground_truth": "7", "style": "rule"}, "a.b": "flat"}
    path = jsonl(json.dumps(row))
    cfg = PromptConfig(answer_key="reward_model.ground_truth")
    (prompt,) = Prompts(path, cfg, tokenizer).take(1)
    assert prompt.answer == "7"
    assert prompt.meta == {"reward_model": row["reward_model"], "a.b": "flat"}
    (prompt,) = Prompts(path, PromptConfig(answer_key="a.b"), tokenizer).take(1)
    assert prompt.answer == "flat"
    with pytest.raises(DataError, match=r"reward_model\.gold: no such key .*'reward_model.style'"):
        Prompts(path, PromptConfig(answer_key="reward_model.gold"), tokenizer)
    with pytest.raises(DataError, match=r"prompt\.text: no such key"):
        Prompts(path, PromptConfig(prompt_key="prompt.text"), tokenizer)


def test_prompts_that_hold_their_answer_are_told(
    jsonl: Jsonl, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    user, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    path = jsonl(*(json.dumps({"prompt": m, "answer": "a"}) for m in ([user], [user, said])))
    Prompts(path, PromptConfig(chat_template=True), tokenizer)
    assert f"{path}: 1 of 2 prompts end with a message of the assistant." in capsys.readouterr().out
