"""The split of a world into placements."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import PlanError
from spmd_rl.mesh.axes import DATA
from spmd_rl.mesh.split import (
    Placement,
    RoleSplit,
    SeparateSplit,
    Split,
    colocated,
    disjoint,
    plan_split,
)


def test_default_split_colocates_both_roles_on_all_ranks() -> None:
    roles = plan_split(Split(), 3)
    assert roles.train.ranks == roles.infer.ranks == (0, 1, 2)
    assert roles.train.axes == {"dp": 1, "fsdp": 3, "tp": 1}
    assert colocated(roles.train, roles.infer)


def test_counts_take_the_next_ranks() -> None:
    roles = plan_split(Split(RoleSplit("4", dp=2), RoleSplit("2")), 8)
    assert roles.train == Placement("train", (0, 1, 2, 3), {"dp": 2, "fsdp": 2, "tp": 1})
    assert roles["infer"].ranks == (4, 5)
    assert disjoint(roles.train, roles.infer)


def test_mixed_split_of_user_roles() -> None:
    roles = plan_split({"judge": RoleSplit("1-2"), "train": RoleSplit("2"), "env": RoleSplit()}, 4)
    assert [placement.ranks for placement in roles.values()] == [(1, 2), (0, 1), (0, 1, 2, 3)]
    assert not disjoint(roles.judge, roles.train)
    assert not colocated(roles.judge, roles.train)


def test_an_engine_that_is_kept_apart() -> None:
    roles = plan_split(SeparateSplit(), 3)
    assert (roles.train.ranks, roles.infer.ranks) == ((0,), (1,))
    trained = plan_split(SeparateSplit(critic=RoleSplit("0-1"), train=RoleSplit("2")), 3)
    assert trained.critic.ranks == trained.train.ranks == (0, 1), "others may share ranks"


@pytest.mark.parametrize(
    "split",
    [
        SeparateSplit(infer=RoleSplit()),
        SeparateSplit(train=RoleSplit()),
        SeparateSplit(critic=RoleSplit("1-2")),
    ],
)
def test_an_engine_that_shares_ranks_is_refused(split: SeparateSplit) -> None:
    with pytest.raises(PlanError, match=r"split\.infer shares ranks with split\.\w+, but this "):
        plan_split(split, 3)


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        (
            Split(RoleSplit("4"), RoleSplit("4")),
            "the split asks for 8 ranks (train 4, infer 4), and the world has 6 "
            "(`run` starts as many as --nproc says)",
        ),
        (
            Split(RoleSplit("7"), RoleSplit("2")),
            "the split asks for 9 ranks (train 7, infer 2), and the world has 6",
        ),
        (Split(RoleSplit("0-6")), "the split asks for 7 ranks (train 0-6), and the world has 6"),
        (Split(RoleSplit("9" * 30)), "asks for 9{30} ranks"),
        (Split(RoleSplit("3-1")), "is empty"),
        (Split(RoleSplit("0")), "is empty"),
        (Split(RoleSplit("some")), "neither 'all'"),
        (Split(RoleSplit(dp=4)), "dp 4 x fsdp 1 x tp 1 = 4, but it has 6 ranks"),
        (Split(RoleSplit(fsdp=5)), "dp 1 x fsdp 5 x tp 1 = 5, but it has 6 ranks"),
        (
            Split(RoleSplit(dp=0)),
            "split.train needs fsdp >= 0 and every other axis >= 1, not pp = 1",
        ),
        (Split(RoleSplit(tp=4)), "dp 1 x fsdp 1 x tp 4 = 4, but it has 6 ranks"),
        (Split(RoleSplit(pp=2, tp=2)), "pp 2 x dp 1 x fsdp 1 x tp 2 = 4, but it has 6 ranks"),
        (Split(RoleSplit(pp=2, ep=2)), "ep = 2 does not divide the 3 ranks of a stage"),
    ],
)
def test_what_does_not_fit_says_why(split: Split, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        plan_split(split, 6)


def test_an_axis_of_a_model_is_refused_where_nobody_has_it() -> None:
    train = plan_split(Split(RoleSplit(tp=2)), 6).train
    assert train.axes == {"dp": 1, "fsdp": 3, "tp": 2}
    with pytest.raises(PlanError, match=r"split\.train\.tp = 2: FSDP2 has the axes dp and fsdp"):
        train.require_axes("FSDP2", DATA, "set it to 1")
    plan_split(Split(), 6).train.require_axes("FSDP2", DATA, "set it to 1")


def test_an_unknown_role_gets_the_names_of_the_split() -> None:
    with pytest.raises(AttributeError, match="train, infer"):
        _ = plan_split(Split(), 1).judge


@given(dp=st.integers(1, 8), fsdp=st.integers(1, 8), spare=st.integers(0, 8))
def test_every_rank_of_a_placement_has_one_data_rank(dp: int, fsdp: int, spare: int) -> None:
    size = dp * fsdp
    placement = plan_split({"a": RoleSplit(str(size), dp=dp)}, size + spare).a
    assert placement.size == math.prod(placement.axes.values()) == size
    assert [placement.data_rank(rank) for rank in placement.ranks] == list(
        range(placement.data_size)
    )


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 3))
def test_counted_roles_never_overlap(sizes: list[int], spare: int) -> None:
    roles = plan_split(
        {f"r{i}": RoleSplit(str(size)) for i, size in enumerate(sizes)}, sum(sizes) + spare
    )
    ranks = [rank for placement in roles.values() for rank in placement.ranks]
    assert ranks == list(range(sum(sizes)))
    with pytest.raises(PlanError):
        plan_split({f"r{i}": RoleSplit(str(size)) for i, size in enumerate(sizes)}, sum(sizes) - 1)
