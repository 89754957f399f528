from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.packing import pack, pack_sft
from spmd_rl.errors import ConfigError, ContractError, DataError
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.routes import EXPERT_IDS
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_values import TokenValues


def _groups(lengths: list[list[int]]) -> list[Group]:
    def sample(uid: int, index: int, size: int) -> Sample:
        tokens = np.full(size, 10 * uid + index, np.int32)
        return Sample(
            uid,
            index,
            tokens,
            -tokens.astype(np.float32),
            np.full(size, 3, np.int32),
            "completed",
            0.7,
            reward=1.0,
        )

    return [
        Group(
            Prompt(uid, np.arange(1 + uid, dtype=np.int32)),
            [sample(uid, i, size) for i, size in enumerate(sizes)],
        )
        for uid, sizes in enumerate(lengths)
    ]


LENGTHS = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4)


def _batch(lengths: list[list[int]], **options: object) -> tuple[Batch, list[np.ndarray]]:
    groups = _groups(lengths)
    rng = np.random.default_rng(0)
    advantages = [rng.normal(size=len(group.samples)) for group in groups]
    return pack(groups, advantages, **options), advantages


def _loss(batch: Batch, per_token: np.ndarray) -> float:
    return float((batch.weight * per_token * batch.mask).sum() / batch.denominator)


def test_every_array_speaks_of_its_token() -> None:
    batch, advantages = _batch([[2, 1], [3]])
    assert batch.lengths.tolist() == [3, 2, 5]
    assert batch.tokens.tolist() == [0, 0, 0, 0, 1, 0, 1, 10, 10, 10]
    assert batch.mask.tolist() == [False, True, True, False, True, False, False, True, True, True]
    assert batch.rollout_logprobs[batch.mask].tolist() == [0, 0, -1, -10, -10, -10]
    assert batch.versions.tolist() == [-1, 3, 3, -1, 3, -1, -1, 3, 3, 3]
    np.testing.assert_array_equal(batch.temperature, np.full(3, 0.7, np.float32))
    flat = np.concatenate(advantages).astype(np.float32)
    np.testing.assert_array_equal(batch.advantages[batch.mask], flat[[0, 0, 1, 2, 2, 2]])
    assert not batch.advantages[~batch.mask].any()
    assert not batch.weight[~batch.mask].any()


@given(LENGTHS, st.integers(0, 99))
def test_aggregations_are_their_definitions(lengths: list[list[int]], seed: int) -> None:
    sizes = [size for group in lengths for size in group]
    rng = np.random.default_rng(seed)
    for aggregation in ("token", "sample", "const"):
        batch, _ = _batch(lengths, aggregation=aggregation, max_response_tokens=7)
        per_token = rng.normal(size=batch.num_tokens)
        pieces = np.split(per_token[batch.mask], np.cumsum(sizes)[:-1])
        expected = {
            "token": sum(piece.sum() for piece in pieces) / max(sum(sizes), 1),
            "sample": np.mean([piece.mean() if len(piece) else 0.0 for piece in pieces]),
            "const": sum(piece.sum() for piece in pieces) / (len(sizes) * 7),
        }[aggregation]
        # Weights are fp32, so terms of size one that cancel leave an error of that size.
        assert _loss(batch, per_token) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_an_execution_counts_once_however_many_samples_it_has() -> None:
    """Two siblings of 1 and 3 tokens, and a run of one sample with 2; then another prompt's."""
    groups = _groups([[1, 3, 2], [4]])
    first, second, third = groups[0].samples
    siblings = [first.replace(execution=0), second.replace(execution=0), third]
    groups = [Group(groups[0].prompt, siblings), groups[1]]
    batch = pack(groups, [np.ones(3), np.ones(1)], aggregation="execution")
    per_token = np.arange(1, 1 + batch.num_tokens, dtype=np.float64)
    one, three, two, four = np.split(per_token[batch.mask], [1, 4, 6])
    expected = [np.concatenate([one, three]).mean(), two.mean(), four.mean()]
    assert batch.denominator == 3
    assert _loss(batch, per_token) == pytest.approx(np.mean(expected), rel=1e-6)


@given(LENGTHS, st.integers(1, 5))
def test_shards_hold_every_sequence_once_and_the_same_denominator(
    lengths: list[list[int]], num_shards: int
) -> None:
    batch, _ = _batch(lengths, aggregation="sample")
    shards = batch.shard(num_shards)
    assert len(shards) == num_shards
    index = np.concatenate([shard.index for shard in shards])
    assert sorted(index.tolist()) == list(range(batch.num_sequences))
    assert {shard.denominator for shard in shards} == {batch.denominator}
    restored = batch.select(index)
    for name in (
        "tokens",
        "mask",
        "weight",
        "advantages",
        "rollout_logprobs",
        "versions",
        "lengths",
        "temperature",
    ):
        joined = np.concatenate([getattr(shard, name) for shard in shards])
        np.testing.assert_array_equal(joined, getattr(restored, name))


@given(LENGTHS, st.integers(1, 5))
def test_scores_of_shards_join_in_the_batch_s_order(
    lengths: list[list[int]], num_shards: int
) -> None:
    batch, _ = _batch(lengths)
    parts = [
        TokenValues(-shard.tokens.astype(np.float32), shard.lengths, shard.index)
        for shard in batch.shard(num_shards)
    ]
    joined = TokenValues.join(parts)
    np.testing.assert_array_equal(joined.values, -batch.tokens.astype(np.float32))
    np.testing.assert_array_equal(joined.lengths, batch.lengths)


def test_a_context_of_its_own_stands_in_place_of_the_prompt() -> None:
    groups = _groups([[2, 1], [3]])
    plain, _ = _batch([[2, 1], [3]])
    first = groups[0].samples
    first[1] = first[1].replace(context=np.array([91, 92, 93], np.int32))
    batch = pack(groups, [np.array([1.0, 2.0]), np.array([3.0])])
    assert batch.lengths.tolist() == [3, 4, 5]
    assert batch.tokens[3:7].tolist() == [91, 92, 93, 1]
    assert batch.mask[3:7].tolist() == [False, False, False, True]
    assert batch.versions[3:7].tolist() == [-1, -1, -1, 3]
    assert batch.denominator == plain.denominator
    others = np.r_[0:3, 7:12]
    for name in ("tokens", "mask", "rollout_logprobs", "versions"):
        expected = getattr(plain, name)[np.r_[0:3, 5:10]]
        np.testing.assert_array_equal(getattr(batch, name)[others], expected)


def test_a_context_serves_a_prompt_without_tokens() -> None:
    prompt = Prompt(5, np.zeros(0, np.int32))
    (group,) = _groups([[2]])
    (sample,) = group.samples
    with pytest.raises(ConfigError, match="prompt 5 has no tokens"):
        pack([Group(prompt, [sample])], [np.ones(1)])
    own = sample.replace(context=np.array([4], np.int32))
    assert pack([Group(prompt, [own])], [np.ones(1)]).tokens.tolist() == [4, 0, 0]


def test_too_few_routes_of_a_context_are_refused() -> None:
    (group,) = _groups([[2, 1]])
    group = replace(group, prompt=Prompt(0, np.arange(3, dtype=np.int32)))
    routes = np.arange(12, dtype=np.uint8).reshape(3, 4)  # of three tokens

    def batch(blob: bytes) -> Batch:
        samples = [
            one.replace(
                columns={EXPERT_IDS: np.full((len(one.tokens), 4), 99, np.uint8)},
                prompt_routes=blob,
            )
            for one in group.samples
        ]
        return pack([replace(group, samples=samples)], [np.ones(2)])

    found = batch(routes.tobytes()).columns[EXPERT_IDS]
    assert found[:3].tolist() == found[5:8].tolist() == routes.tolist()
    assert batch(routes.tobytes() + bytes(4)).columns[EXPERT_IDS].tolist() == found.tolist()
    for size in (4, 8, 11):
        with pytest.raises(ContractError, match=rf"prompt_routes of {size} bytes: expected 4 for"):
            batch(routes.tobytes()[:size])


def test_sft_never_learns_a_first_token() -> None:
    pairs = [
        (np.array([5, 6, 7], np.int32), np.array([True, False, True])),
        (np.array([8, 9], np.int32), np.array([False, True])),
    ]
    batch = pack_sft(pairs)
    assert batch.mask.tolist() == [False, False, True, False, True]
    assert batch.denominator == 2
    assert set(batch.versions.tolist()) == {-1}
    assert pairs[0][1].tolist() == [True, False, True]


def test_bad_requests_are_refused() -> None:
    groups = _groups([[2, 1]])
    ones = [np.ones(2)]
    with pytest.raises(ContractError, match="an advantage for each of the samples"):
        pack(groups, [np.ones(1)])
    with pytest.raises(ConfigError, match="one of token, sample, execution, const, not 'mean'"):
        pack(groups, ones, aggregation="mean")
    with pytest.raises(ConfigError, match="max_response_tokens"):
        pack(groups, ones, aggregation="const")
    with pytest.raises(ContractError, match="no sequences"):
        pack([], [])
    empty = [Group(Prompt(3, np.zeros(0, np.int32)), groups[0].samples)]
    with pytest.raises(ConfigError, match="prompt 3 has no tokens"):
        pack(empty, ones)


def test_failed_samples_leave_the_batch_that_the_others_make(make_group, failed) -> None:
    whole, emptied = make_group([1, 0]), replace(make_group([], uid=1), failed=failed("poisoned"))
    alone, beside = (
        pack(groups, group_advantage(groups)) for groups in ([whole], [emptied, whole])
    )
    for entry in fields(alone):
        np.testing.assert_array_equal(getattr(alone, entry.name), getattr(beside, entry.name))
    with pytest.raises(DataError, match="no sample of this step is usable: poisoned"):
        pack([emptied], group_advantage([emptied]))
    silent = replace(emptied, failed=[emptied.failed[0].replace(metadata={})])
    with pytest.raises(DataError, match="usable: no reason is given"):
        pack([silent], group_advantage([silent]))
