"""Trees of conversations: nothing is told twice, nothing is left out, and each says who spoke."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.report.conversations import (
    MAX_TEXT,
    SampleOfTree,
    conversation_tree,
    num_letters,
    num_speeches,
)
from spmd_rl.report.samples import PageBudget, read_samples
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.report.synthetic import HOSTILE

PROMPT = [1, 2, 3]


def letters(tokens: Any) -> str:
    """Return a letter for each token."""
    return "".join(chr(ord("a") + token) for token in tokens)


def paths(tree: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield what is said from the root to each end of a tree."""
    said = before + "".join(speech["text"] for speech in tree["speeches"])
    for branch in tree["branches"]:
        yield from paths(branch, said)
    if not tree["branches"]:
        yield said


def all_speeches(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from tree["speeches"]
    for branch in tree["branches"]:
        yield from all_speeches(branch)


@st.composite
def episodes(draw: st.DrawFn) -> list[SampleOfTree]:
    """Samples that begin with the prompt, with other tokens, or with a part of an earlier one."""
    samples: list[SampleOfTree] = []
    for index in range(draw(st.integers(1, 5))):
        before = PROMPT
        if samples and draw(st.booleans()):
            other = draw(st.sampled_from(samples))
            whole = [*other.before, *other.tokens]
            before = whole[: draw(st.integers(1, len(whole)))]
            before += draw(st.lists(st.integers(0, 3), max_size=2))
        elif draw(st.booleans()):
            before = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        versions = draw(st.lists(st.integers(-1, 2), min_size=len(tokens), max_size=len(tokens)))
        mask = [version >= 0 and draw(st.booleans()) for version in versions]
        samples.append(SampleOfTree(index, before, tokens, versions, mask))
    return samples


@settings(max_examples=300, deadline=None)
@given(episodes())
def test_each_sample_is_a_path_and_each_learned_token_is_told_once(
    samples: list[SampleOfTree],
) -> None:
    tree = conversation_tree(samples, letters)
    told = [*paths(tree)]
    for sample in samples:
        whole = letters([*sample.before, *sample.tokens])
        assert any(path.startswith(whole) for path in told)
    num_learned = sum(speech["num_learned"] for speech in all_speeches(tree))
    assert num_learned == sum(sum(sample.mask) for sample in samples)
    num_tokens = sum(speech["num_tokens"] for speech in all_speeches(tree))
    assert num_tokens <= sum(len(one.before) + len(one.tokens) for one in samples)
    assert num_letters(tree) == num_tokens


def test_a_branch_shares_what_it_begins_with() -> None:
    first = SampleOfTree(
        0,
        PROMPT,
        [10, 11, 5, 12],
        [4, 4, -1, 6],
        [True, True, False, True],
        [
            {"role": "assistant", "content": "x"},
            {"role": "tool", "content": "y"},
            {"role": "assistant", "content": "z"},
            {"role": "user", "content": "which the policy never saw"},
        ],
        "solver",
        {0: 0.5, 3: 1.0},
    )
    retry = SampleOfTree(1, [*PROMPT, 10, 11, 5], [13], [6], [False], has_context=True)
    for samples in ([first, retry], [retry, first]):
        tree = conversation_tree(samples, letters)
        assert tree["samples"] == [0, 1]
        assert [(one["role"], one["text"]) for one in tree["speeches"]] == [
            ("prompt", "bcd"),
            ("assistant", "kl"),
            ("tool", "f"),
        ]
        assert tree["speeches"][1] == {
            "role": "assistant",
            "agent": "solver",
            "reward": 0.5,
            "text": "kl",
            "num_tokens": 2,
            "num_learned": 2,
            "versions": [4, 4],
        }
        ends = [one for branch in tree["branches"] for one in branch["speeches"]]
        assert [(one["text"], one["num_learned"], one["versions"]) for one in ends] == [
            ("m", 1, [6, 6]),
            ("n", 0, [6, 6]),
        ]
        assert num_speeches(tree) == 4


def test_a_sample_that_goes_on_where_another_ends_is_no_branch() -> None:
    """As where each turn is a sample of its own, whose context are the turns before."""
    samples, before = [], PROMPT
    for index in range(500):
        samples.append(SampleOfTree(index, before, [index % 7], [0], [True]))
        before = [*before, index % 7]
    tree = conversation_tree(samples, letters)
    assert tree["branches"] == []
    assert num_speeches(tree) == 500


def test_messages_that_do_not_fit_the_tokens_name_nobody() -> None:
    sample = SampleOfTree(0, PROMPT, [5, 6], [0, -1], [True, False], [{"role": "user"}, "odd", 3])
    fitting = replace(sample, messages=[{"role": "assistant"}, {"role": "a"}, {"role": "b"}])
    roles = [
        [speech["role"] for speech in conversation_tree([one], letters)["speeches"]]
        for one in (sample, fitting)
    ]
    assert roles == [["prompt", "assistant", "tool"], ["prompt", "assistant", "a, b"]]


def test_without_a_tokenizer_messages_say_what_was_said() -> None:
    said = [{"role": "assistant", "content": "x" * 1000}, {"role": "tool", "content": HOSTILE}]
    sample = SampleOfTree(0, PROMPT, [5, 6], [0, -1], [True, False], said)
    _, drawn, seen = conversation_tree([sample], lambda tokens: None)["speeches"]
    assert len(drawn["text"]) == MAX_TEXT + len(" … ")
    assert seen["text"] == HOSTILE


def test_the_page_has_a_tree_for_each_episode_of_several_speeches(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 7], np.int32)
    versions = np.array([2, -1, 3], np.int32)
    logprobs = np.zeros(3, np.float32)
    talk = Sample(0, 0, tokens, logprobs, versions, "completed", text="abc", execution=4)
    branch = talk.replace(index=1, context=np.array([1, 5, 6], np.int32), metadata={"messages": 7})
    plain = talk.replace(index=2, versions=tokens, mask=tokens > 0, execution=-1)
    run = RunFolder.open(tmp_path / "run", "", {})
    run.write_samples(1, [Group(Prompt(0, np.array([1], np.int32)), [talk, branch, plain])])
    (group,) = read_samples(run.path, {}, PageBudget())["steps"][0]["groups"]
    (conversation,) = group["conversations"]
    assert conversation["name"] == "episode 4"
    assert [one["samples"] for one in conversation["tree"]["branches"]] == [[0], [1]]
    json.dumps(conversation)


def test_a_damaged_row_has_no_tree(tmp_path: Path) -> None:
    """Fewer versions than tokens, as somebody's own writer of samples may leave them."""
    run = RunFolder.open(tmp_path / "run", "", {})
    row = {"prompt_uid": 0, "index": 0, "text": "ab", "tokens": [1, 2], "versions": [1]}
    (run.path / "samples").mkdir(exist_ok=True)
    (run.path / "samples/step_00001.jsonl").write_text(json.dumps(row) + "\n")
    (group,) = read_samples(run.path, {}, PageBudget())["steps"][0]["groups"]
    assert group["conversations"] == []
