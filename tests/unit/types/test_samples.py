"""Groups that came as columns equal the groups that were sent, whatever is done with them."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spmd_rl.algo.advantages import group_advantage, rloo_advantage
from spmd_rl.algo.group_metrics import group_metrics
from spmd_rl.algo.packing import pack
from spmd_rl.errors import ContractError
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group, GroupColumns
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def made(uid: int, sizes: list[int]) -> Group:
    """A group of which some samples have observations, masks of their own, and metadata."""

    def sample(index: int, size: int) -> Sample:
        tokens = np.arange(100 * uid + 10 * index, 100 * uid + 10 * index + size, dtype=np.int32)
        versions = np.full(size, uid, np.int32)
        if uid % 3 == 1:
            versions[1:2] = -1
        status = "truncated" if index % 2 else "completed"
        reward = float((uid * index) % 3) / 3
        one = Sample(
            uid,
            index,
            tokens,
            -tokens.astype(np.float32),
            versions,
            status,
            0.7,
            f"{uid}",
            reward,
            {"a": reward},
            kept=bytes(size) if index % 2 else b"",
            metadata={"turns": [uid]} if (uid + index) % 3 == 1 else {},
        )
        if uid % 2 and index % 2:
            one = one.replace(context=np.arange(1 + index, dtype=np.int32) + 7)
        return one.replace(mask=tokens % 2 == 0) if uid % 3 == 2 and index else one

    prompt = Prompt(
        uid, np.arange(1 + uid % 3, dtype=np.int32), f"p{uid}", f"a{uid}", "here", {"line": uid}
    )
    samples = [sample(index, size) for index, size in enumerate(sizes)]
    return Group(
        prompt,
        samples,
        [] if sizes else [sample(0, 2).replace(status="failed", metadata={"error": "slow"})],
    )


def sent(groups: list[Group]) -> list[Group]:
    return Group.to_columns(groups).rows()


def same_batch(one: Batch, other: Batch) -> bool:
    values = [
        [getattr(batch, entry.name) for entry in fields(batch) if entry.name != "kept"]
        for batch in (one, other)
    ]
    kept = [[sets.tobytes() for sets in batch.kept] for batch in (one, other)]
    return kept[0] == kept[1] and all(
        np.asarray(a).dtype == np.asarray(b).dtype and np.array_equal(a, b)
        for a, b in zip(*values, strict=True)
    )


def plain(group: Group) -> str:
    return repr((group.prompt, group.samples, group.failed))


SIZES = st.lists(
    st.one_of(st.just([]), st.lists(st.integers(0, 4), min_size=2, max_size=4)),
    min_size=1,
    max_size=6,
)


@given(SIZES, st.data())
def test_what_is_reckoned_does_not_depend_on_how_groups_came(
    sizes: list[list[int]], data: st.DataObject
) -> None:
    """From two ranks, some left out, some looked at: the same bits as of groups made here."""
    here = [made(uid, own) for uid, own in enumerate(sizes)]
    cut = data.draw(st.integers(0, len(here)))
    came = sent(here[:cut]) + sent(here[cut:])
    for group in data.draw(st.lists(st.sampled_from(came))):
        assert group.samples is not None
    order = data.draw(st.permutations(range(len(here))))[: data.draw(st.integers(1, len(here)))]
    here, came = [here[i] for i in order], [came[i] for i in order]
    for _ in range(2):
        for estimate in (group_advantage, rloo_advantage):
            pairs = zip(estimate(here), estimate(came), strict=True)
            assert all(one.tobytes() == other.tobytes() for one, other in pairs)
        assert group_metrics(came, 7) == group_metrics(here, 7)
        assert [group.num_samples for group in came] == [len(group.samples) for group in here]
        assert all(
            np.array_equal(one.rewards, other.rewards)
            for one, other in zip(came, here, strict=True)
        )
        if any(group.samples for group in here):
            assert same_batch(pack(came, group_advantage(came)), pack(here, group_advantage(here)))
    assert [plain(group) for group in came] == [plain(group) for group in here]


def test_nothing_is_cut_until_somebody_looks() -> None:
    groups = sent([made(0, [2, 3]), made(1, [1, 1])])
    columns = Group.to_columns(groups)
    pack(groups, group_advantage(groups))
    assert "groups" not in vars(columns)
    assert groups[1].samples[0].index == 0
    assert "groups" in vars(columns)
    assert Group.to_columns(groups) is columns, "looking changes nothing"


def test_a_list_of_samples_may_be_changed() -> None:
    here, groups = (
        [made(0, [2, 3, 1]), made(1, [1, 1])],
        sent([made(0, [2, 3, 1]), made(1, [1, 1])]),
    )
    for group in (here[0], groups[0]):
        group.samples.pop(1)
        group.samples[0] = group.samples[0].replace(reward=5.0)
    assert [group.num_samples for group in groups] == [2, 2]
    assert groups[0].rewards.tolist() == [5.0, here[0].samples[1].reward]
    assert same_batch(pack(groups, group_advantage(groups)), pack(here, group_advantage(here)))


def test_rewards_are_the_caller_s_own() -> None:
    (group,) = sent([made(2, [1, 1, 1])])
    before = group.rewards
    group.rewards[:] = 7
    assert group.rewards.tolist() == before.tolist() == [sample.reward for sample in group.samples]


def test_a_group_is_a_dataclass_still() -> None:
    group = made(3, [1, 2])
    for copied in (copy.copy, copy.deepcopy, replace):
        (came,) = sent([group])
        assert plain(copied(came)) == plain(came) == plain(group)
    assert replace(sent([group])[0], samples=[]).num_samples == 0
    with pytest.raises(AttributeError, match="a Group has no answer"):
        _ = sent([group])[0].answer  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        sent([group])[0].prompt = group.prompt  # type: ignore[misc]


def test_columns_join_and_are_cut() -> None:
    groups = [made(uid, [uid, 2]) for uid in range(4)]
    whole = Group.to_columns(groups)
    parts = GroupColumns.join([whole[:1], whole[1:3], whole[3:]])
    assert [plain(group) for group in parts.rows()] == [plain(group) for group in groups]
    assert [plain(group) for group in whole[2:].rows()] == [plain(group) for group in groups[2:]]


def test_a_mask_that_is_not_given_is_of_the_tokens_with_a_version() -> None:
    none, versions = np.zeros(3), np.array([4, -1, 5], np.int32)
    sample = Sample(0, 0, none.astype(np.int32), none.astype(np.float32), versions, "completed")
    assert sample.mask.tolist() == [True, False, True]
    assert sample.replace(mask=np.zeros(3, np.bool_)).mask.tolist() == [False] * 3


def test_what_no_sample_has_does_not_cross() -> None:
    """Masks, metadata and kept sets are empty columns, and stay so through cuts and joins."""
    plain_ones, others = [made(3, [2])], [made(2, [2, 4]), made(5, [3, 2, 1])]
    columns = Group.to_columns(plain_ones)
    optional = columns.samples.OPTIONAL
    assert [len(getattr(columns.samples, name)) for name in optional] == [0] * len(optional)
    assert [len(getattr(columns[:1].samples, name)) for name in optional] == [0] * len(optional)
    others[0].samples[1] = others[0].samples[1].replace(prompt_routes=b"routes")
    joined = GroupColumns.join([columns, Group.to_columns(others), columns])
    assert [plain(group) for group in joined.rows()] == [
        plain(group) for group in plain_ones + others + plain_ones
    ]
    assert all(len(getattr(joined.samples, name)) for name in optional)


def test_a_mask_of_another_length_is_refused() -> None:
    short = made(2, [1, 4]).samples[1].replace(mask=np.ones(3, np.bool_))
    with pytest.raises(ContractError, match="prompt 2, sample 1: every token needs .* of the mask"):
        Sample.to_columns([made(2, [1, 4]).samples[0], short])


def with_column(sizes: list[int], values: NDArray[Any]) -> list[Sample]:
    """Samples of one prompt, the last of which has the column "seen"."""
    samples = made(2, sizes).samples
    return [*samples[:-1], samples[-1].replace(columns={"seen": values})]


def test_columns_of_samples_cross_and_those_without_have_zeros() -> None:
    values = np.arange(8, dtype=np.int16).reshape(4, 2)
    (group,) = sent([Group(made(2, [1]).prompt, with_column([1, 4], values))])
    assert [one.columns["seen"].tolist() for one in group.samples] == [[[0, 0]], values.tolist()]
    assert group.samples[1].columns["seen"].dtype == np.int16
    columns = Group.to_columns([group, made(3, [2])])
    assert columns[1:].rows()[0].samples[0].columns["seen"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.zeros((3, 2), np.int16), "sample 1: the column 'seen' needs a row for each token"),
        (np.zeros((4, 3), np.int16), "do not fit each other: the column 'seen' is int16 with"),
        (np.zeros((4, 2), np.int8), "do not fit each other: the column 'seen' is int"),
    ],
)
def test_columns_that_do_not_fit_are_refused(values: NDArray[Any], problem: str) -> None:
    first = made(2, [2]).samples[0].replace(columns={"seen": np.zeros((2, 2), np.int16)})
    second = with_column([1, 4], values)[1]
    with pytest.raises(ContractError, match=problem):
        Sample.to_columns([second, first])


def test_what_fails_crosses_and_may_be_changed() -> None:
    (group,) = sent([made(1, [])])
    assert [(one.status, one.metadata) for one in group.failed] == [("failed", {"error": "slow"})]
    assert Group.to_columns([group]) is group._source[0][0], "looking changes nothing"  # type: ignore[index]
    group.failed.append(group.failed[0].replace(index=1))
    assert plain(sent([group])[0]) == plain(group)


def test_lengths_that_only_seem_to_fit_are_refused() -> None:
    columns = Prompt.to_columns(
        [Prompt(uid, np.zeros(int(uid == 0), np.int32)) for uid in range(3)]
    )
    assert len(columns.rows()) == 3
    # the second's sum is 1 too, as 64 bits have it
    for lengths in ([2, -1, 0], [2**63 - 1, 2**63 - 1, 3]):
        with pytest.raises(ValueError, match="lengths must be counts"):
            replace(columns, lengths=np.array(lengths)).rows()
