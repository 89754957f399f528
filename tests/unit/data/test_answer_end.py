"""Where a reward model is read: at the end of what the chat template makes of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.data.render.answer_end import AnswerEnd
from spmd_rl.errors import DataError
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.data.chat_templates import CHATML, LLAMA, MISTRAL, PLAIN, QWEN, tokenizer_of

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "plain": PLAIN}
ENDS = {"chatml": "<|end|>\n", "llama": "<|eot|>", "qwen": "<|end|>\n", "mistral": "</s>"}
ENDS["plain"] = "\n"
ASKED = [{"role": "user", "content": "the cat"}]


def _answered(content: str) -> list[dict[str, str]]:
    return [*ASKED, {"role": "assistant", "content": content}]


def _ids(tokenizer: Any, messages: list[dict[str, str]], **settings: Any) -> list[int]:
    """Return what transformers makes of the messages, as users of a reward model call it."""
    found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **settings)
    return list(found)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reward_model_learns_what_transformers_renders(
    name: str, jsonl: Callable[..., str]
) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    path = jsonl(json.dumps({"prompt": ASKED, "chosen": "the hat", "rejected": "Ab abc"}))
    cfg = PairConfig(chat_template=True)
    ((chosen, rejected),) = PreferencePairs(path, cfg, tokenizer, for_reward_model=True).next(1)
    assert chosen.tokens.tolist() == _ids(tokenizer, _answered("the hat"))
    assert rejected.tokens.tolist() == _ids(tokenizer, _answered("Ab abc"))
    assert np.flatnonzero(chosen.mask).tolist() == [len(chosen.tokens) - 1]


def test_without_a_template_nothing_changes(jsonl: Callable[..., str]) -> None:
    tokenizer = tokenizer_of(CHATML)
    path = jsonl(json.dumps({"prompt": "the cat", "chosen": "the hat", "rejected": "Ab abc"}))
    for better, other in zip(
        *(
            PreferencePairs(path, PairConfig(), tokenizer, for_reward_model=flag).next(1)[0]
            for flag in (False, True)
        ),
        strict=True,
    ):
        assert better.encoded() == other.encoded()
        assert better.tokens[-1] == tokenizer.eos_token_id


def test_what_is_too_long_is_dropped_or_named(jsonl: Callable[..., str]) -> None:
    tokenizer = tokenizer_of(CHATML)
    rows = [{"prompt": "a" * n, "chosen": "b", "rejected": "c"} for n in (4, 400)]
    path = jsonl(*map(json.dumps, rows))
    cfg = PairConfig(chat_template=True, max_prompt_tokens=100)
    assert len(PreferencePairs(path, cfg, tokenizer, for_reward_model=True)) == 1
    long = jsonl(json.dumps(rows[0] | {"chosen": "abc " * 70_000}), name="long.jsonl")
    with pytest.raises(DataError, match="prompt and answer have"):
        PreferencePairs(long, cfg, tokenizer, for_reward_model=True)


def _group(tokenizer: Any, answer: list[int], status: str, **prompt: Any) -> Group:
    tokens = np.array(answer, np.int32)
    asked = np.array(_ids(tokenizer, ASKED, add_generation_prompt=True), np.int32)
    sample = Sample(
        0, 0, tokens, np.full(len(tokens), -1, np.float32), np.zeros(len(tokens), np.int32), status
    )  # type: ignore[arg-type]
    return Group(Prompt(0, asked, **({"chat": {"messages": ASKED}} | prompt)), [sample])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "qwen"])
def test_a_drawn_answer_is_read_where_the_template_ends(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    end = AnswerEnd.of(tokenizer, tokenizer)
    assert tokenizer.decode(end.tokens) == ENDS[name]
    text = " the hat" if name == "mistral" else "the hat"
    (drawn,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    group = _group(tokenizer, [*drawn, tokenizer.eos_token_id], "completed")
    (after,) = end.after([group])
    (sample,) = after.samples
    whole = [*group.prompt.tokens.tolist(), *sample.tokens.tolist()]
    expected = tokenizer.apply_chat_template(_answered("the hat"), tokenize=False)
    assert tokenizer.decode(whole) == expected
    assert sample.mask.tolist() == [True] * len(drawn) + [False] * len(end.tokens)
    assert len(sample.logprobs) == len(sample.versions) == len(sample.tokens)
    assert group.samples[0].tokens[-1] == tokenizer.eos_token_id  # the original stays


def test_other_answers_stay_as_they_are() -> None:
    tokenizer = tokenizer_of(CHATML)
    end = AnswerEnd.of(tokenizer, tokenizer)
    (drawn,) = tokenizer(["the hat"], add_special_tokens=False)["input_ids"]
    ended = [*drawn, tokenizer.eos_token_id]
    cut = _group(tokenizer, drawn, "truncated")
    of_text = _group(tokenizer, ended, "completed", chat={})
    full = _group(tokenizer, ended, "completed")
    narrow = AnswerEnd(end.tokens, end.eos, len(full.prompt.tokens) + len(drawn) + len(end.tokens))
    for one, group in ((end, cut), (end, of_text), (narrow, full)):
        assert one.after([group])[0].samples[0].tokens.tolist() == group.samples[0].tokens.tolist()
    # one that ended by a stop text has no end-of-text token of its own
    (stopped,) = end.after([_group(tokenizer, drawn, "completed")])
    assert stopped.samples[0].tokens.tolist() == [*drawn, *end.tokens]


def test_a_template_without_answers_is_refused() -> None:
    class Silent:
        chat_template = "x"

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
            return "nothing"

    with pytest.raises(DataError, match="does not show an assistant's answer"):
        AnswerEnd.of(Silent(), Silent())  # type: ignore[arg-type]
