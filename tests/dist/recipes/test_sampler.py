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
    words = (*ASYNC, "--sampling.max_tokens=12", "--steps=8", "--sampler.max_running=1")
    ended = run("recipe.py", *words, nproc=2)
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


ROUNDS = (
    *(EVEN, STOPS, "--trainer.lr=1e-2", "--sampling.max_tokens=40", "--behaviour=rollout"),
    *("--sampler.oversample=2", "--sampler.max_lag=2", "--sampler.round_tokens=6", "--steps=4"),
)


def test_unfinished_samples_go_on_in_the_next_step(run: Any) -> None:
    """No split changes which samples are carried, and all tokens have the bits of their version."""
    alone = run("grpo", *ROUNDS, name="alone")
    split = run("grpo", *ROUNDS, *DISJOINT, nproc=2, name="split")
    check_lag(alone, max_lag=2)
    rows = [row for step in range(1, 5) for row in alone.samples(step)]
    carried = [row for row in rows if len({*row["versions"]}) > 1]
    assert carried, "no sample went on under newer weights"
    assert all(np.diff(row["versions"]).min() >= 0 for row in carried)
    uids = [*chain(*learned(alone))]
    assert (len(uids), len({*uids})) == (32, 32), "each prompt is learned from once"
    for step, row in enumerate(alone.metrics):
        versions = [version for one in alone.samples(step + 1) for version in one["versions"]]
        older = sum(version < step for version in versions) / len(versions)
        assert row["version/older_share"] == pytest.approx(older)
        assert row["onpolicy/compared_tokens"] == sum(version == step for version in versions)
    assert drawn(split) == drawn(alone)


def test_old_tokens_are_context_alone(run: Any) -> None:
    """A recipe that is asynchronous masks them too; without the setting all tokens teach."""
    words = (*ASYNC, *DISJOINT, "--steps=3")
    masked = run("grpo_async", *words, "--mask_lag=0", nproc=2, name="masked")
    plain = run("grpo_async", *words, "--mask_lag=1", nproc=2, name="plain")
    assert [row["version/masked_share"] for row in masked.metrics] == [0, 1, 1]
    assert [row["version/masked_share"] for row in plain.metrics] == [0, 0, 0]
    assert [row["train/grad_norm"] > 0 for row in masked.metrics] == [True, False, False]
    assert all(row["train/grad_norm"] > 0 for row in plain.metrics)
    assert drawn(masked)[:2] == drawn(plain)[:2]


FADING = """
from even import even

def fading(prompt, sample):
    \"\"\"Be the same for all samples of two weights or more, but for every eighth prompt.\"\"\"
    is_early = sample.versions.max() < 2
    return even(prompt, sample) if is_early or prompt.uid % 8 == TEACHES else 1.0
"""


def fading(folder: Path, teaches: int = -1) -> tuple[str, ...]:
    """Words of a run whose groups stop teaching after step 2, but for those of some prompts."""
    (folder / "even.py").write_text((Path(__file__).parents[2] / "system/even.py").read_text())
    (folder / "fading.py").write_text(FADING.replace("TEACHES", str(teaches)))
    reward = f"--reward={folder / 'fading.py'}:fading"
    return *DAPO[1:], reward, "--sampler.max_gen_batches=2", "--run.save_every=0"


def test_a_run_whose_groups_stop_teaching_ends_as_after_its_last_step(
    run: Any, tmp_path: Path
) -> None:
    data = Path(__file__).parents[3] / "examples/arithmetic/eval.jsonl"
    words = (*fading(tmp_path), "--steps=4", f"--eval.data={data}@[:8]")
    sentence = (
        "step 3 needs 8 groups, but of 16 only 0 were accepted (16 by equal_rewards rejected, with "
        "a mean reward of 1.00): the run ends after step 2\n"
    )
    for _ in range(2):  # the same command generates the same groups, and ends again
        ended = run("grpo", *words)
        assert ended.code == 0, ended.sentence
        assert sentence in ended.output
        assert {row["step"] for row in ended.metrics} == {1, 2}
        assert "eval/eval/reward" in ended.metrics[-1]
        assert [path.name for path in (ended.folder / "checkpoints").iterdir()] == ["step_000002"]
        assert (ended.folder / "hf/model.safetensors").is_file()
        assert json.loads((ended.folder / "run.json").read_text())["early_end"] in sentence
    resumed = run("grpo", *words, EVEN, "--run.resume=true")
    assert resumed.code == 0, resumed.sentence
    assert {row["step"] for row in resumed.metrics} == {1, 2, 3, 4}
    num_rejected = sum(row.get("rollout/rejected", 0) for row in ended.metrics)
    first = resumed.samples(3)[0]["prompt_uid"]
    assert first < 16 + num_rejected + 16, "the prompts were given back"
    assert "early_end" not in json.loads((resumed.folder / "run.json").read_text())


@pytest.mark.system
def test_groups_that_stop_teaching_beneath_pushes_end_the_run(run: Any, tmp_path: Path) -> None:
    words = (*fading(tmp_path), "--steps=6", "--sampler.oversample=1.5")
    ended = run("grpo_fully_async", *words, nproc=2)
    assert ended.code == 0, ended.sentence
    num_steps = len(ended.metrics)
    assert 2 <= num_steps < 6
    assert f": the run ends after step {num_steps}\n" in ended.output
    assert (ended.folder / f"checkpoints/step_{num_steps:06d}/state.json").is_file()
    assert (ended.folder / "hf/model.safetensors").is_file()


@pytest.mark.system
@pytest.mark.parametrize("nproc", [1, 3])
def test_a_step_may_learn_from_the_groups_that_there_are(
    run: Any, tmp_path: Path, nproc: int
) -> None:
    words = (*fading(tmp_path, teaches=5), "--steps=4", "--sampler.when_short=train")
    ended = run("grpo", *words, nproc=nproc)
    assert ended.code == 0, ended.sentence
    num_groups = [len(uids) for uids in learned(ended)]
    assert num_groups[:2] == [8, 8]
    assert [8 - row.get("rollout/missing", 0) for row in ended.metrics] == num_groups
    late = [uid for uids in learned(ended)[2:] for uid in uids]
    assert {uid % 8 for uid in late} == {5}
    assert max(num_groups[2:]) < 8
    if nproc == 1:  # several engines may end the groups of a later batch first
        assert len(late) <= 4, "of 16 groups, two may teach"
    assert [row["train/grad_norm"] > 0 for row in ended.metrics] == [True] * 4


@pytest.mark.system
def test_a_run_may_fail_when_its_groups_stop_teaching(run: Any, tmp_path: Path) -> None:
    ended = run("grpo", *fading(tmp_path), "--steps=4", "--sampler.when_short=error")
    assert ended.code == 1
    assert "step 3 needs 8 groups, but of 16 only 0 were accepted" in ended.sentence
    assert not (ended.folder / "hf").exists()


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
