from __future__ import annotations

from dataclasses import replace

import pytest

from spmd_rl.algo.group_metrics import group_metrics, rewards_are_equal


def test_by_hand(make_group) -> None:
    groups = [
        make_group([1, 1], lengths=[2, 5], version=3),
        make_group([0, 0], lengths=[1, 2], version=1),
        make_group([0, 1], lengths=[4, 4], version=2),
    ]
    metrics = group_metrics(groups, version=3)
    assert metrics == {
        "reward/failed_samples": 0.0,
        "reward/failed_groups": 0.0,
        "reward/mean": 0.5,
        "reward/mean_error": pytest.approx(0.5 / 3**0.5),  # of the means 1, 0 and 0.5
        "reward/std": 0.5,
        "reward/solve_none": pytest.approx(1 / 3),
        "reward/solve_all": pytest.approx(1 / 3),
        "rollout/response_tokens_mean": 3.0,
        "rollout/truncated": pytest.approx(1 / 6),
        "version/lag_mean": pytest.approx((7 * 0 + 3 * 2 + 8 * 1) / 18),
        "version/lag_max": 2.0,
        "version/older_share": pytest.approx((3 + 8) / 18),
    }


def test_what_failed_is_counted_and_in_no_statistic(make_group, failed) -> None:
    whole = [make_group([1, 0]), make_group([1, 1], uid=1)]
    emptied = replace(make_group([], uid=2), failed=failed("slow", "slow"))
    part = replace(whole[0], failed=failed("slow"))
    counts = {"reward/failed_samples": 3.0, "reward/failed_groups": 1.0}
    assert (
        group_metrics([part, whole[1], emptied], version=0)
        == group_metrics(whole, version=0) | counts
    )
    assert group_metrics([emptied], version=0) == {
        "reward/failed_samples": 2.0,
        "reward/failed_groups": 1.0,
    }


def test_failures_are_counted_by_kind_and_episodes_once(make_group, failed) -> None:
    lost = [one.replace(metadata=one.metadata | {"failure": "tool"}) for one in failed("a", "b")]
    group = replace(make_group([1, 1, 1, 0]), failed=[*lost, *failed("slow")])
    found = group_metrics([group], version=0)
    assert (found["failed/tool"], found["reward/failed_samples"]) == (2.0, 3.0)
    samples = [
        one.replace(execution=execution)
        for one, execution in zip(group.samples, [0, 0, 0, 1], strict=True)
    ]
    found = group_metrics([replace(group, samples=samples)], version=0)
    assert (found["reward/mean"], found["reward/std"]) == (0.5, 0.5)


def test_no_groups_say_nothing() -> None:
    assert group_metrics([], version=0) == {}


def test_the_parts_of_a_reward_are_means_over_those_that_have_them(make_group) -> None:
    group = make_group([1, 0, 0])
    parts = [{"reward": 1.0, "form": 1.0, "late": 4.0}, {"reward": 0.0, "form": 0.0}, {}]
    changed = [one.replace(parts=part) for one, part in zip(group.samples, parts, strict=True)]
    got, plain = (
        group_metrics([replace(group, samples=changed)], version=0),
        group_metrics([group], version=0),
    )
    assert got == plain | {"reward/form": 0.5, "reward/late": 4.0}


def test_a_part_never_stands_for_one_of_ours(make_group) -> None:
    group = make_group([1, 0])
    posing = [one.replace(parts={"mean": 7.0}) for one in group.samples]
    assert group_metrics([replace(group, samples=posing)], version=0)["reward/mean"] == 0.5


def test_what_is_flat(make_group, failed) -> None:
    emptied = replace(make_group([], uid=2), failed=failed("slow", "slow"))
    assert rewards_are_equal([make_group([1, 1]), emptied, make_group([0, 0, 0], uid=1), emptied])
    assert not rewards_are_equal([make_group([1, 1]), make_group([0, 0, 1], uid=1)])
    assert not rewards_are_equal(
        [make_group([1]), make_group([1], uid=1)]
    )  # nothing that could differ
    assert not rewards_are_equal([make_group([float("nan")] * 2)])  # no rewards
    assert not rewards_are_equal([emptied])
    assert not rewards_are_equal([])


def test_metrics_of_each_source_if_there_are_several(make_group) -> None:
    def of(source, *args, **kwargs):
        group = make_group(*args, **kwargs)
        return replace(group, prompt=group.prompt.replace(source=source))

    groups = [
        of("easy", [1, 1], lengths=[2, 5]),
        of("hard", [0, 1], lengths=[1, 2]),
        of("easy", [0, 1], lengths=[4, 5]),
        of("lost", []),
    ]
    found = group_metrics(groups, version=0)
    assert {name: value for name, value in found.items() if name.startswith("source/")} == {
        "source/easy/share": 0.5,
        "source/easy/reward": 0.75,
        "source/easy/response_tokens_mean": 4.0,
        "source/hard/share": 0.25,
        "source/hard/reward": 0.5,
        "source/hard/response_tokens_mean": 1.5,
        "source/lost/share": 0.25,
    }
    alone = group_metrics([of("easy", [1, 1]), of("easy", [0, 1])], version=0)
    assert not any(name.startswith("source/") for name in alone)


def test_what_hooks_emitted_is_a_metric(make_group) -> None:
    group = make_group([1, 0, 1])
    emitted = [{"metrics": {"calls": 2.0}}, {"metrics": {"calls": 4.0, "cost": 1.0}}, {}]
    samples = [
        one.replace(metadata=known) for one, known in zip(group.samples, emitted, strict=True)
    ]
    found = group_metrics([replace(group, samples=samples)], version=0)
    hooks = {name: value for name, value in found.items() if name.startswith("hook/")}
    assert hooks == {"hook/calls": 3.0, "hook/cost": 1.0}
