"""Axes: which ranks differ in some axes alone, against Megatron's own order of ranks."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import PlanError
from spmd_rl.mesh.axes import (
    COMMUNICATING,
    DATA,
    SHARD,
    STAGE_ENDS,
    communicating_groups,
    groups_along,
    ranks_along,
)
from spmd_rl.mesh.split import RoleSplit, plan_split

EIGHT = tuple(range(10, 18))


def test_neighbours_share_matrices_and_stages_lie_far_apart() -> None:
    axes = {"pp": 2, "dp": 1, "fsdp": 2, "tp": 2}
    assert groups_along(EIGHT, axes, ("tp",)) == [(10, 11), (12, 13), (14, 15), (16, 17)]
    assert groups_along(EIGHT, axes, ("pp",)) == [(10, 14), (11, 15), (12, 16), (13, 17)]
    assert groups_along(EIGHT, axes, DATA) == [(10, 12), (11, 13), (14, 16), (15, 17)]
    assert ranks_along(EIGHT, axes, 13, SHARD) == (12, 13, 16, 17)


def test_experts_fold_the_ranks_of_a_stage() -> None:
    axes = {"pp": 2, "dp": 2, "fsdp": 1, "tp": 2, "ep": 2}
    assert groups_along(EIGHT, axes, ("ep",)) == [(10, 11), (12, 13), (14, 15), (16, 17)]
    assert groups_along(EIGHT, axes, ("edp",)) == [(10, 12), (11, 13), (14, 16), (15, 17)]
    assert ranks_along(EIGHT, axes, 15, ("pp", "ep")) == (10, 11, 14, 15)


def test_neighbours_may_share_an_expert() -> None:
    axes = {"dp": 2, "fsdp": 1, "tp": 4, "ep": 2, "etp": 2}
    assert groups_along(EIGHT, axes, ("etp",)) == [(10, 11), (12, 13), (14, 15), (16, 17)]
    assert groups_along(EIGHT, axes, ("ep",)) == [(10, 12), (11, 13), (14, 16), (15, 17)]
    assert groups_along(EIGHT, axes, ("edp",)) == [(10, 14), (11, 15), (12, 16), (13, 17)]
    with pytest.raises(PlanError, match="ep 2 x etp 3 does not divide the 8 ranks of a stage"):
        plan_split({"train": RoleSplit(ep=2, etp=3)}, 8)


def test_the_first_and_the_last_stage_meet() -> None:
    axes = {"pp": 4, "dp": 1, "fsdp": 1, "tp": 2}
    assert groups_along(EIGHT, axes, (STAGE_ENDS,)) == [(10, 16), (11, 17)]
    assert ranks_along((3,), {"dp": 1, "fsdp": 1, "tp": 1}, 3, (STAGE_ENDS,)) == (3,)


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=5, max_size=5), st.integers(0, 3))
def test_sets_along_axes_divide_the_ranks(sizes: list[int], ep: int) -> None:
    axes = dict(zip(("pp", "dp", "fsdp", "cp", "tp"), sizes, strict=True))
    stage = prod(sizes[1:])
    axes["ep"] = [one for one in range(1, stage + 1) if stage % one == 0][-(ep % 2)]
    ranks = tuple(range(5, 5 + prod(sizes)))
    made = communicating_groups(ranks, axes)
    for along in COMMUNICATING:
        groups = groups_along(ranks, axes, along)
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members)), f"along {along} no rank is in two groups"
        if along != (STAGE_ENDS,):
            assert sorted(members) == list(ranks), along
            assert len({len(group) for group in groups}) == 1, along
        assert all(group in made for group in groups if 1 < len(group) < len(ranks)), along


def test_a_shard_of_the_data_is_the_same_on_all_its_ranks() -> None:
    split = RoleSplit(pp=2, dp=2, tp=2)
    placement = plan_split({"a": split}, 8).a
    assert [placement.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    for rank in range(8):
        shard = placement.shard_ranks(rank)
        assert {placement.data_rank(one) for one in shard} == {placement.data_rank(rank)}
        assert len(shard) == placement.size // placement.data_size
