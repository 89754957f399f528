"""One rule says whether a message is one that is held."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.data.logs.form import call, message
from spmd_rl.gateway.message_tree import MessagePath, MessageTree, TokenTree

words = st.text("ab \n", max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    """Messages in our form, in which each result answers a call before it."""
    messages: list[dict[str, Any]] = []
    ids: list[str] = []
    for number in range(draw(st.integers(1, 7))):
        role = draw(st.sampled_from(["system", "user", "assistant", *(["tool"] if ids else [])]))
        if role == "tool":
            messages.append(message(role, draw(words), tool_call_id=draw(st.sampled_from(ids))))
        elif role == "assistant":
            calls = [
                call(f"given{number}-{at}", draw(words), draw(st.dictionaries(words, values)))
                for at in range(draw(st.integers(0, 2)))
            ]
            ids += [one["id"] for one in calls]
            thought = draw(words)
            messages.append(message(role, draw(words), reasoning_content=thought, tool_calls=calls))
        else:
            messages.append(message(role, draw(words)))
    return messages


def digest(messages: list[dict[str, Any]]) -> bytes:
    return MessagePath.of(messages).digests[-1]


def oracle(messages: list[dict[str, Any]]) -> Any:
    """The rule, written in another way: all ids are replaced by the order of their calls."""
    order: dict[str, str] = {}
    plain = []
    for one in deepcopy(messages):
        one.pop("reasoning_content", None)
        for made in one.get("tool_calls", ()):
            order[made["id"]] = made["id"] = f"#{len(order)}"
            made["function"]["arguments"] = whole(made["function"]["arguments"])
        if "tool_call_id" in one:
            one["tool_call_id"] = order[one["tool_call_id"]]
        plain.append(one)
    return json.dumps(plain, sort_keys=True)


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


@given(conversations(), conversations())
def test_digests_are_equal_where_the_rule_says_so(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) == (oracle(one) == oracle(other))


@given(conversations(), st.data())
def test_what_clients_change_does_not_matter(messages: Any, data: Any) -> None:
    changed = deepcopy(messages)
    for one in changed:
        if data.draw(st.booleans()):
            one.pop("reasoning_content", None)
        for made in one.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(json.dumps(made["function"]["arguments"]))
    renamed = json.loads(json.dumps(changed).replace('"given', '"toolu_'))
    assert digest(changed) == digest(messages) == digest(renamed)


@given(conversations(), st.data())
def test_another_word_is_another_message(messages: Any, data: Any) -> None:
    changed = deepcopy(messages)
    number = data.draw(st.integers(0, len(messages) - 1))
    changed[number]["content"] += "c"
    ours, theirs = MessagePath.of(messages).digests, MessagePath.of(changed).digests
    assert ours[: number + 1] == theirs[: number + 1]
    assert all(a != b for a, b in zip(ours[number + 1 :], theirs[number + 1 :], strict=True))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [(1, 1.0, True), (1, True, False), (0, False, False), ("1", 1, False), (None, {}, False)],
)
def test_values_of_arguments(left: Any, right: Any, same: bool) -> None:
    one, other = (
        [message("assistant", "", tool_calls=[call("i", "f", {"a": value})])]
        for value in (left, right)
    )
    assert (digest(one) == digest(other)) is same


def test_results_answer_their_call_whatever_its_id_is() -> None:
    def history(ids: list[str], answered: list[str]) -> list[dict[str, Any]]:
        calls = [call(one, "f", {}) for one in ids]
        results = [message("tool", "same", tool_call_id=one) for one in answered]
        return [message("assistant", "", tool_calls=calls), *results]

    assert digest(history(["a", "b"], ["a", "b"])) == digest(history(["x", "y"], ["x", "y"]))
    assert digest(history(["a", "b"], ["a", "b"])) != digest(history(["a", "b"], ["b", "a"]))


USER, REPLY = message("user", "hi"), message("assistant", "yes", reasoning_content="hm")


def grown(*turns: tuple[list[Any], Any], tools: bytes = b"") -> tuple[MessageTree[int], list[Any]]:
    tree: MessageTree[int] = MessageTree()
    nodes, messages = [], []
    for number, (rest, reply) in enumerate(turns):
        messages += rest
        nodes.append(tree.add(tree.attach(messages, tools), reply, number))
        messages.append(reply)
    return tree, nodes


def test_a_conversation_goes_on_after_its_last_reply() -> None:
    more, done = message("user", "more"), message("assistant", "done")
    tree, (first, second) = grown(([USER], REPLY), ([more], done))
    assert second.parent is first and second.num_messages == 4
    last = message("user", "last")
    attach = tree.attach([USER, REPLY, more, done, last], b"")
    assert (attach.node, attach.rest, attach.reason) == (second, [last], "extends")
    assert [one.held for one in second.path()] == [0, 1]


def test_thoughts_that_were_not_sent_back_match() -> None:
    tree, (node,) = grown(([USER], REPLY))
    dropped = message("assistant", "yes")
    other = message("assistant", "yes", reasoning_content="no")
    assert tree.attach([USER, dropped, USER], b"").node is node
    assert tree.attach([USER, other, USER], b"").node is None


def test_the_thought_chooses_among_equal_replies() -> None:
    tree, (first,) = grown(([USER], REPLY))
    other = message("assistant", "yes", reasoning_content="no")
    second = tree.add(tree.attach([USER], b""), other, 1)
    assert tree.attach([USER, REPLY, USER], b"").node is first
    assert tree.attach([USER, other, USER], b"").node is second
    assert tree.attach([USER, message("assistant", "yes"), USER], b"").node is second


def test_reasons() -> None:
    tree, (node,) = grown(([USER], REPLY), tools=b"tools")
    text = message("assistant", "calling f")
    assert tree.attach([USER], b"tools").reason == "new"
    assert tree.attach([USER, REPLY, USER], b"").reason == "tools changed"
    assert tree.attach([USER, text, USER], b"tools").reason == "rewritten"
    after = tree.attach([USER, REPLY, USER, text, USER], b"tools")
    assert (after.node, after.reason) == (node, "rewritten")
    other = message("user", "another")
    assert tree.attach([other, text, USER], b"tools").reason == "new"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=6), st.data())
def test_token_tree_finds_the_longest_true_prefix(turns: list[list[int]], data: Any) -> None:
    tree: TokenTree[int] = TokenTree()
    for number, ids in enumerate(turns):
        tree.add(np.array(ids, np.int32), number)
    asked = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    found, length = tree.find(np.array(asked, np.int32))
    fitting = [ids for ids in turns if len(ids) < len(asked) and asked[: len(ids)] == ids]
    assert length == max(map(len, fitting), default=0)
    assert (found is None) == (not fitting)
    if found is not None:
        assert turns[found] == asked[:length]
