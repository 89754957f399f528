"""Whole runs with a sampler on real ranks: fully asynchronous, and on-policy with full steps."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.dist

EVEN = f"--reward={Path(__file__).parents[2] / 'system/even.py'}:even"
# answers end at random, so that some are still running when weights are pushed
STOPS = "--sampling.stop_ids=[20, 21, 22]"
DISJOINT = ("--split.train.ranks=1", "--split.infer.ranks=1")
ASYNC = (EVEN, STOPS, "--trainer.lr=1e-2", "--sampling.max_tokens=40")
DAPO = (EVEN, "--trainer.lr=1e-2", "--algorithm=dapo", "--sampling.max_tokens=1")


def learned(ended: Any) -> list[list[int]]:
    """The uids that each step has learned from, in their order."""
    steps = range(1, len(ended.metrics) + 1)
    return [[*dict.fromkeys(row["prompt_uid"] for row in ended.samples(step))] for step in steps]


def drawn(ended: Any) -> list[Any]:
    steps = range(1, len(ended.metrics) + 1)
    return [[(row["tokens"], row["logprobs"]) for row in ended.samples(step)] for step in steps]


def check_lag(ended: Any, max_lag: int) -> None:
    """No token is too old, and bits are compared where engine and trainer have one version."""
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        assert row["version/lag_max"] <= max_lag
        assert row["onpolicy/mismatched_tokens"] == 0
    assert ended.metrics[0]["onpolicy/compared_tokens"] > 0


HELD = """
import spmd_rl as rl

class Held(rl.Rollout):
    def has_work(self):
        \"\"\"Rest in the first answer of a step until the weights of that step are pushed.\"\"\"
        groups = self._flow.snapshots()
        begun = [g.prompt.uid for g in groups if any(len(s.tokens) for s in g.samples)]
        steps = [uid // 8 for uid in begun if uid % 8 == 0 and uid < 64]
        return super().has_work() and not any(step > self.engine.version for step in steps)
"""
HELD_RECIPE = """
from held import Held
from spmd_rl.recipes import policy_run
from spmd_rl.recipes.grpo_fully_async import Config, check, main

policy_run.Rollout = Held
"""


def test_engines_go_on_beneath_pushes(run: Any, tmp_path: Path) -> None:
    """Prompts are learned from in their order, and answers go on under newer weights.

    One group at a time is drawn, and the first of each step meets a push.
    """
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "recipe.py").write_text(HELD_RECIPE)
    ended = run("recipe.py", *ASYNC, "--steps=8", "--sampler.max_running=1", nproc=2)
    check_lag(ended, max_lag=2)
    assert max(row["version/lag_max"] for row in ended.metrics) > 0
    assert [*chain(*learned(ended))] == [*range(64)]
    rows = [row for step in range(1, 9) for row in ended.samples(step)]
    assert any(len({*row["versions"]}) > 1 for row in rows), "no answer went on beneath a push"
    assert all(np.diff(row["versions"]).min(initial=0) >= 0 for row in rows)


@pytest.mark.system
def test_buffers_and_half_finished_answers_go_on_after_a_restart(run: Any) -> None:
    first = run("grpo_fully_async", *ASYNC, "--steps=3", nproc=2)
    state = json.loads((first.folder / "checkpoints/step_000003/sampler/state.json").read_text())
    assert len(state["entries"]) >= 16
    second = run("grpo_fully_async", *ASYNC, "--steps=6", "--run.resume=true", nproc=2)
    check_lag(second, max_lag=2)
    assert [*chain(*learned(second))] == [*range(48)]
    oldest = min(min(row["versions"]) for row in second.samples(4))
    assert oldest < 3, "what was buffered or half finished was drawn again"


@pytest.mark.system
def test_groups_that_teach_nothing_are_replaced(run: Any) -> None:
    """The steps are full, and the split does not change what they learn from."""
    alone = run("grpo", *DAPO, "--steps=3", name="alone")
    split = run("grpo", *DAPO, *DISJOINT, "--steps=3", nproc=2, name="split")
    more = run("grpo", *DAPO, "--steps=3", "--sampler.oversample=2", name="more")
    for ended in (alone, split, more):
        check_lag(ended, max_lag=0)
        assert {len(uids) for uids in learned(ended)} == {8}
        num_alike = 1 if ended is more else 3
        assert drawn(ended)[:num_alike] == drawn(alone)[:num_alike]
        for row in ended.metrics:
            assert row["rollout/rejected"] == row.get("rollout/rejected_equal_rewards", 0)
    uids = [*chain(*learned(alone))]
    rejected = sum(row["rollout/rejected"] for row in alone.metrics)
    assert rejected > 0
    assert uids == sorted(uids)
    assert uids[-1] == len(uids) + rejected - 1
    rewards = {
        uid: {row["reward"] for row in alone.samples(1) if row["prompt_uid"] == uid}
        for uid in learned(alone)[0]
    }
    assert all(len(values) > 1 for values in rewards.values())


@pytest.mark.system
def test_a_filter_that_nothing_passes_ends_the_run(run: Any, tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text("def flat(prompt, sample):\n    return 1.0\n")
    words = ("--algorithm=dapo", f"--reward={tmp_path / 'flat.py'}:flat")
    ended = run("grpo", *words, "--steps=1", "--sampler.max_gen_batches=2")
    assert ended.code == 1
    assert ended.sentence.endswith(
        "step 1 needs 8 groups, but of 16 only 0 were accepted (16 by equal_rewards rejected): "
        "choose other prompts or another filter, or raise sampler.max_gen_batches"
    )
