"""Whole runs of algorithms that need more roles than trainer and engine."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.dist.recipes.conftest import EXAMPLE, Ended, Run
from tests.system.kill_resume import SMALL, Outcome
from tests.system.kill_resume import Run as Resumable

pytestmark = [pytest.mark.dist, pytest.mark.system]

CUT = 3  # the step of the checkpoint that a run goes on from, after the refresh in step 3
PPO = [
    "grpo",
    "--nproc=2",
    "--algorithm=ppo",
    "--gae_lambda=0.9",
    "--critic.init=random",
    "--critic.lr=1e-2",
    "--critic_warmup_steps=1",
    "--kl.coef=0.1",
    "--kl.refresh_every=2",
    "--trainer.minibatches=2",
    "--run.keep_checkpoints=9",
]
EVEN = f"--reward={Path(__file__).parents[2] / 'system/even.py'}:even"


def weights(ended: Ended) -> str:
    return hashlib.sha256((ended.folder / "hf/model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Resumable:
    """PPO on two ranks, with a reference that is refreshed after two steps; nobody disturbed it."""
    run = Resumable(tmp_path_factory.mktemp("ppo"), [*PPO, *SMALL], name="whole")
    run.finish()
    return run


def resumed(whole: Resumable, name: str) -> Resumable:
    """Return the same command in a folder whose newest checkpoint is that of step CUT."""
    other = Resumable(whole.cwd, whole.words, name=name)
    shutil.copytree(whole.folder, other.folder)
    shutil.rmtree(other.folder / "hf")
    config = other.folder / "config.toml"
    config.write_text(config.read_text().replace('"whole"', f'"{name}"'))
    for step in range(CUT + 1, 6):
        shutil.rmtree(other.folder / f"checkpoints/step_{step:06d}")
    return other


def test_ppo_with_a_critic_resumes_bit_for_bit(whole: Resumable) -> None:
    run = resumed(whole, "resumed")
    assert run.finish() == Outcome.of(whole.folder)
    assert f"resuming at step {CUT + 1} from " in run.output
    assert "bit for bit" not in run.output


@pytest.mark.parametrize("role", ["reference", "critic"])
def test_a_lost_role_shows(whole: Resumable, role: str) -> None:
    """With the weights of step 1 in one of its roles, the run learns otherwise."""
    run = resumed(whole, f"no-{role}")
    folder = run.folder / "checkpoints"
    shutil.rmtree(folder / f"step_{CUT:06d}" / role)
    shutil.copytree(folder / f"step_{1:06d}" / role, folder / f"step_{CUT:06d}" / role)
    state = folder / f"step_{CUT:06d}/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"checksums": {}}))
    assert run.finish().weights != Outcome.of(whole.folder).weights


def test_what_ppo_measures(whole: Resumable) -> None:
    rows = Outcome.of(whole.folder).metrics
    assert "train/loss" not in rows[0]  # the critic learned alone
    assert all("train/loss" in row for row in rows[1:])
    assert all(row["critic/loss"] > 0 and row["critic/lr"] == 0.01 for row in rows)
    assert rows[0]["train/kl"] == rows[1]["train/kl"] == 0
    assert rows[2]["train/kl"] == 0  # refreshed
    assert rows[3]["train/kl"] != 0


def test_the_policy_rests_while_the_critic_warms_up(run: Run) -> None:
    words = [EVEN, "--algorithm=ppo", "--critic.init=random", "--critic_warmup_steps=2"]
    resting = run("grpo", *words, "--steps=2", name="resting")
    first = run("grpo", *words, "--steps=0", name="first")
    moved = run("grpo", *words, "--steps=3", name="moved")
    assert resting.code == first.code == moved.code == 0, resting.sentence
    assert weights(resting) == weights(first) != weights(moved)


def test_the_reference_is_the_policy_after_a_warm_up(run: Run) -> None:
    recipe = str(EXAMPLE / "recipe.py")
    words = ["--kl.coef=0.1", "--warmup_steps=3", "--warmup_pairs=16", "--steps=3"]
    ended = run(recipe, *words, "--run.save_every=1")
    assert ended.code == 0, ended.sentence
    distances = [row["train/kl"] for row in ended.metrics]
    assert distances[0] == 0
    assert all(distance > 0 for distance in distances[1:])


@pytest.mark.parametrize("split", [[], ["--split.train.ranks=1", "--split.infer.ranks=1"]])
def test_a_loss_with_every_term_runs_one_step_ahead(run: Run, split: list[str]) -> None:
    ended = run(
        "grpo_async",
        *split,
        "--steps=3",
        "--behaviour=old",
        "--correction.mode=mask",
        "--correction.reject=geometric",
        "--entropy_coef=0.01",
        "--kl.coef=0.1",
        "--opsm_delta=0.001",
        nproc=2,
    )
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        assert 0 < row["train/correction_weight"] <= 2
        assert 0 <= row["train/rejected_frac"] < 1


def test_a_reward_without_parts_is_refused(run: Run) -> None:
    ended = run("grpo", "--algorithm=gdpo", "--steps=1")
    assert ended.code != 0
    assert "the reward function must return a dict" in ended.sentence


def test_a_reward_in_parts(run: Run) -> None:
    reward = f"--reward={Path(EXAMPLE) / 'reward.py'}:in_parts"
    ended = run("grpo", "--algorithm=gdpo", reward, "--reward_weights={right = 1.0}", "--steps=2")
    assert ended.code == 0, ended.sentence


def test_a_critic_on_a_rank_of_its_own_learns_as_one_beside_the_trainer(run: Run) -> None:
    words = ["grpo", "--steps=3", "--algorithm=ppo", "--critic.init=random", "--critic.lr=1e-2"]
    apart = ["--split.train.ranks=1", "--split.infer.ranks=1"]
    beside = run(*words, *apart, EVEN, nproc=2, name="beside")
    alone = run(*words, *apart, "--split.critic.ranks=1", EVEN, nproc=3, name="alone")
    assert (beside.code, alone.code) == (0, 0), beside.sentence + alone.sentence
    assert weights(beside) == weights(alone)
    assert [row["critic/loss"] for row in beside.metrics] == [
        row["critic/loss"] for row in alone.metrics
    ]
