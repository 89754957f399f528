"""Tokens of older weights that are left out of what a step learns."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.algorithm import without_old_tokens
from spmd_rl.algo.packing import pack
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

VERSIONS = st.lists(st.integers(-1, 6), max_size=8)


def group_of(uid: int, versions: list[list[int]]) -> Group:
    prompt = Prompt(uid, np.array([1, 2], np.int32))
    return Group(prompt, [sample(uid, index, own) for index, own in enumerate(versions)])


def sample(uid: int, index: int, versions: list[int]) -> Sample:
    """A sample whose token at each third place is not learned anyhow."""
    size = len(versions)
    of = np.array(versions, np.int32)
    mask = (of != -1) & (np.arange(size) % 3 != 2)
    tokens, logprobs = np.arange(size, dtype=np.int32), np.full(size, -0.5, np.float32)
    return Sample(uid, index, tokens, logprobs, of, "completed", reward=1.0, mask=mask)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(VERSIONS, max_size=3), max_size=3), st.integers(0, 6), st.integers(0, 3))
def test_each_old_token_is_masked_and_nothing_else_changes(
    versions: list[list[list[int]]], version: int, max_lag: int
) -> None:
    groups = [group_of(uid, own) for uid, own in enumerate(versions)]
    learned, share = without_old_tokens(groups, version, max_lag)
    num_masked = num_before = 0
    for before, after in zip(groups, learned, strict=True):
        for one, other in zip(before.samples, after.samples, strict=True):
            for place, of in enumerate(one.versions.tolist()):
                is_old = of != -1 and version - of > max_lag
                assert other.mask[place] == (one.mask[place] and not is_old)
                num_masked += int(one.mask[place]) - int(other.mask[place])
                num_before += int(one.mask[place])
            assert other.replace(mask=one.mask).__dict__.keys() == one.__dict__.keys()
            for name in ("tokens", "versions", "logprobs", "reward", "status"):
                assert np.array_equal(getattr(one, name), getattr(other, name))
    assert share == (num_masked / num_before if num_masked else 0.0)


def test_a_batch_learns_from_what_is_left_alone() -> None:
    """The denominator counts learned tokens, and a sample of old tokens alone weighs nothing."""
    groups = [group_of(0, [[4, 4], [5, 5], [3, 5]])]
    learned, share = without_old_tokens(groups, 5, 1)
    batch = pack(learned, [np.array([1.0, -1.0, 2.0])])
    assert (share, batch.denominator) == (1 / 6, 5.0)
    assert batch.mask.tolist() == [*[0, 0, 1, 1], *[0, 0, 1, 1], *[0, 0, 0, 1]]
    everything_old, all_of_it = without_old_tokens(groups, 9, 1)
    batch = pack(everything_old, [np.array([1.0, -1.0, 2.0])])
    assert (all_of_it, batch.mask.any(), batch.denominator) == (1.0, False, 1.0)
    assert groups[0].samples[2].mask.tolist() == [True, True], "the groups keep their masks"
