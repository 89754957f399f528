"""What graders read of a response: its last turn, after the thought."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmd_rl.hooks.load import load_function
from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.rewards.code.graders import last_block
from spmd_rl.rollout.episodes import with_turns
from spmd_rl.types.samples import NO_VERSION, Sample
from tests.unit.rewards.cases import ask, say

# a response that each grader finds right, beside the answer "B" or the meta
RIGHT = {
    "math": r"\boxed{B}",
    "boxed_math": r"\boxed{B}",
    "multiple_choice": "Answer: B",
    "exact_match": "B",
    "f1": "B",
    "ifeval": "B",
    **dict.fromkeys(
        [f"boxed_{name}" for name in ("exact", "contains", "multiple_choice", "exact_match", "f1")],
        r"\boxed{B}",
    ),
    "boxed_last_number": r"\boxed{7}",
}
META = {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "B"}]}


def graded(name: str, prompt_text: str, sample: Sample) -> float:
    answer = "7" if name == "boxed_last_number" else "B"
    result = load_function("reward", name)(ask(answer, prompt_text, **META), sample)
    return float(result["reward"] if isinstance(result, dict) else result)


@pytest.mark.parametrize("name", RIGHT)
def test_only_what_follows_a_closed_thought_is_read(name: str) -> None:
    right = RIGHT[name]
    for text in (right, f"<think>No.</think>{right}", f"No.</think>\n{right}"):
        assert graded(name, "", say(text)) == 1, text
    for text in (
        f"<think>{right}",
        f"<think>{right}</think>I do not know.",
        f"<think>No.</think>{right}<think>Or",
        f"{right}</think>",
    ):
        assert graded(name, "", say(text)) == 0, text
    opened = "Q?<|assistant|><think>\n"
    assert graded(name, opened, say(right)) == 0, "the thought that the template began goes on"
    assert graded(name, opened, say(f"No.</think>{right}")) == 1
    assert graded(name, "Q?<think>\n\n</think>\n\n", say(right)) == 1
    assert graded(name, "Put thoughts into <think> first.", say(right)) == 1


def test_code_of_a_thought_is_no_program() -> None:
    text = "<think>\n```python\nx = 1\n```\n</think>I do not know."
    assert last_block(final_text(ask(), say(text)), "python") is None
    assert last_block(final_text(ask(), say(text[:-20])), "python") is None


def turns(*said: tuple[str, str], tail: str = "") -> Sample:
    messages = [{"role": role, "content": content} for role, content in said]
    return say("".join(content for _, content in said)).replace(metadata={"messages": messages})


@pytest.mark.parametrize(
    "name", ["exact", "contains", "last_number", "math", "exact_match", "dapo"]
)
def test_what_a_tool_says_is_no_answer(name: str) -> None:
    grader = load_function("reward", name)

    def reward(*said: tuple[str, str]) -> Any:
        result = grader(ask("8"), turns(*said))
        return result["accuracy"] if name == "dapo" else result

    right = "Answer: 8" if name == "dapo" else "8"
    told = ("tool", right)
    assert reward(("assistant", "call"), told, ("assistant", right)) == 1
    assert reward(("assistant", "call"), told, ("assistant", "no")) == 0
    assert reward(("assistant", "call"), told) == 0
    assert reward(told) == 0
    assert reward(("assistant", right), told, ("assistant", "")) == 0


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ([("assistant", "<think>a"), ("tool", "8"), ("assistant", "b")], ""),
        ([("assistant", "<think>a"), ("tool", "8"), ("assistant", "b</think>c")], "c"),
        ([("assistant", "<think>a</think>call"), ("tool", "8"), ("assistant", "b")], "b"),
        ([("assistant", "call"), ("tool", "8<think>\n"), ("assistant", "b")], ""),
        ([("assistant", "call"), ("tool", "of <think> tags"), ("assistant", "b")], "b"),
        ([("assistant", "<think>a"), ("tool", "</think>8"), ("assistant", "b")], ""),
    ],
)
def test_a_thought_may_go_on_over_several_turns(said: list[tuple[str, str]], read: str) -> None:
    assert final_text(ask(), turns(*said)) == read


def test_turns_of_tokens_are_told_apart_by_who_drew_them() -> None:
    """The log-probs of what was observed are 0, and its version is -1."""
    tokens = np.array([1, 2, 3, 4, 5], np.int32)
    versions = np.array([0, 0, NO_VERSION, NO_VERSION, 1], np.int32)
    drawn = Sample(7, 0, tokens, np.zeros(5, np.float32), versions, "completed", text="12345")
    sample = with_turns(drawn, lambda ids: "".join(map(str, ids)))
    assert sample.messages == [
        {"role": "assistant", "content": "12"},
        {"role": "tool", "content": "34"},
        {"role": "assistant", "content": "5"},
    ]
    assert sample.answer == "5" and sample.text == "12345"
    again = Sample.to_columns([sample]).rows()[0]
    assert again.messages == sample.messages

    given = drawn.replace(metadata={"messages": [{"role": "assistant", "content": "hi"}]})
    assert with_turns(given, str).answer == "hi", "what the episode says of its turns holds"
    alone = drawn.replace(versions=np.zeros(5, np.int32))
    assert with_turns(alone, str) is alone
    assert alone.messages == [{"role": "assistant", "content": "12345"}]
    assert alone.answer == "12345"
    observed = drawn.replace(versions=np.full(5, NO_VERSION, np.int32))
    assert with_turns(observed, str).answer == ""
