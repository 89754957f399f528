"""Engines that share a model, on real gloo ranks: the samples of one engine that has all of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from spmd_rl.model.tokenizer import light_tokenizer
from spmd_rl.model.tokenizer_rules import QWEN2_SPLIT
from tests.dist.recipes.conftest import EXAMPLE, Ended, Run, run_in
from tests.dist.recipes.mixtures import MIXTURES, write_mixture
from tests.dist.recipes.test_endings import AT_STEP_2, disturbed, kill_rank_1, strike
from tests.dist.recipes.test_expert_engines import EPISODES
from tests.dist.recipes.test_loops import EVEN
from tests.dist.recipes.test_requests import LONG, PUSHES, drawn
from tests.dist.recipes.test_sleep import ALWAYS, POISONED, check_same
from tests.system.kill_resume import ROUNDS

pytestmark = pytest.mark.dist

STEPS = ("--steps=2", f"--reward={EVEN}", "--engine.num_pages=256")
Mixed = dict[str, Ended]
APART = ("--split.train.ranks=1", "--split.infer.ranks=2", "--split.infer.tp=2")


def write_qwen2(folder: Path, **sizes: int) -> Path:
    """Write a folder with weights whose projections have biases that are not zero.

    `sizes` are set in its config.
    """
    shutil.copytree(EXAMPLE / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    family = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | family | {"head_dim": 16} | sizes))
    weights = dict(random_weights(read_spec(folder), 3))
    for name, one in weights.items():
        if name.endswith("bias"):
            one.normal_(std=0.3)
    save_file(weights, folder / "model.safetensors")
    _read_as_qwen2(folder)
    return folder


def _read_as_qwen2(folder: Path) -> None:
    """Have the tokenizer the parts that transformers would give it, which each rank would import
    for seconds otherwise.
    """
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rust.normalizer, rust.decoder = normalizers.NFC(), decoders.ByteLevel()
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rust.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"unk_token": "<|end|>"}))
    assert light_tokenizer(folder) is not None


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A trainer and an engine that each have the whole model, and sum as two ranks do."""
    return run_in(tmp_path_factory.mktemp("alone"), "grpo", *STEPS, "--run.row_shards=2")


def test_two_ranks_draw_what_one_does(run: Run, alone: Ended) -> None:
    """The trainer is on one of them, so that its gradients have one order of sums."""
    shared = run("grpo", *STEPS, "--split.train.ranks=0-0", "--split.infer.tp=2", nproc=2)
    check_same(shared, alone, 2)
    check_bits(shared)


def test_trainer_and_engines_of_four_ranks(run: Run) -> None:
    """Colocated: one engine over four ranks, of which two have the same keys."""
    ended = run("grpo", *STEPS, "--split.infer.tp=4", nproc=4)
    check_bits(ended)


def test_two_engines_of_two_ranks_with_biases(run: Run, tmp_path: Path) -> None:
    folder = write_qwen2(tmp_path / "qwen2")
    words = (f"--model={folder}", "--trainer.init=folder", "--split.infer.tp=2")
    check_bits(run("grpo", *STEPS, *words, nproc=4))


def test_requests_go_on_under_pushed_weights(run: Run) -> None:
    """A push takes place between two steps of both ranks."""
    found = drawn(run(PUSHES, *LONG, "--trainer.lr=0.01", *APART, nproc=3))
    assert found["mixed_samples"] > 0
    assert found["decreasing_versions"] == 0
    assert found["unequal_tokens"] == 0
    assert found["compared_tokens"] > 100
    assert found["unequal_under_the_other_version"] > 0


def test_rounds_of_requests(run: Run) -> None:
    """Calls end and others begin between any two steps of both ranks."""
    check_bits(run("grpo", *STEPS, *ROUNDS, "--steps=5", "--split.infer.tp=2", nproc=2))


def test_an_engine_that_sleeps_has_the_same_bits(run: Run, alone: Ended) -> None:
    words = (*STEPS, ALWAYS, "--split.train.ranks=0-0", "--split.infer.tp=2")
    asleep = run(POISONED, *words, nproc=2)
    check_same(asleep, alone, 2)
    check_bits(asleep)


def test_episodes_of_the_first_rank(run: Run, tmp_path: Path) -> None:
    """Only that rank hears of their turns."""
    (tmp_path / "episodes.py").write_text(EPISODES)
    words = (*STEPS, f"--hooks.generate={tmp_path}/episodes.py:talk", "--split.infer.tp=2")
    check_bits(run("grpo", *words, nproc=2))


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (3, ["--split.train.ranks=2", "--split.train.tp=2", "--split.infer.ranks=1"]),
        (2, ["--split.train.tp=2", "--split.infer.tp=2"]),
        (4, ["--split.train.tp=2", "--split.infer.tp=4"]),
    ],
)
def test_trainers_of_two_ranks(run: Run, num_ranks: int, words: list[str]) -> None:
    """Pushes go from parts of matrices to engines that share a model among any number of ranks."""
    check_bits(run("grpo", *STEPS, "--trainer.lr=0.01", *words, nproc=num_ranks))


@pytest.mark.parametrize("tp", [1, 2])
def test_trainers_whose_ranks_share_matrices_and_sequences(
    run: Run, tmp_path: Path, tp: int
) -> None:
    """Two ranks have parts of each matrix, and two others have the tokens between theirs."""
    folder = write_qwen2(tmp_path / "qwen2", num_key_value_heads=4)
    words = [f"--model={folder}", "--trainer.init=folder", "--trainer.lr=0.01"]
    words += ["--split.train.tp=2", "--split.train.cp=2", f"--split.infer.tp={tp}"]
    words += ["--trainer.max_tokens=48", "--run.verify_every=1", "--sampling.top_p=0.9"]
    check_bits(run("grpo", *STEPS, *words, nproc=4))


MIXED = {
    "alone": (1, ("--run.row_shards=2",)),
    "trainer and engine": (2, ("--split.train.tp=2", "--split.infer.tp=2")),
    "trainers that share experts": (4, ("--split.train.tp=2", "--split.train.ep=2")),
    "an engine of its own, routes replayed": (
        3,
        (
            *("--split.train.ranks=1", "--split.infer.ranks=2", "--split.infer.tp=2"),
            "--sampling.replay_routes=true",
        ),
    ),
    "an engine that sleeps, beside a reference": (
        2,
        (
            *("--split.train.tp=2", "--split.train.ep=2", "--split.infer.tp=2", "--kl.coef=0.01"),
            ALWAYS,
        ),
    ),
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """Runs of a mixture whose ranks share matrices."""
    folder = tmp_path_factory.mktemp("mixed")
    model = write_mixture(folder / "model", request.param)
    words = (*STEPS, f"--model={model}", "--trainer.init=folder", "--run.verify_every=1")
    return {
        name: run_in(folder, "grpo", *words, *others, nproc=nproc, name=f"r{number}")
        for number, (name, (nproc, others)) in enumerate(MIXED.items())
    }


@pytest.mark.parametrize("split", MIXED)
def test_ranks_that_share_a_mixture(split: str, mixed: Mixed) -> None:
    check_bits(mixed[split])
    first, expected = (mixed[name].samples(1) for name in (split, "alone"))
    for key in ("tokens", "logprobs"):
        assert [one[key] for one in first] == [one[key] for one in expected]
    assert all(row["onpolicy/router_flips"] == 0 for row in mixed[split].metrics)


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (2, ["--split.train.tp=2"]),
        (2, ["--split.train.cp=2"]),
        (4, ["--split.train.tp=2", "--split.train.ep=4", "--split.infer.ranks=0-0"]),
        (
            4,
            [
                *("--split.train.ranks=1", "--split.infer.ranks=1", "--split.reference.ranks=2-3"),
                *("--split.reference.tp=2", "--split.critic.ranks=2-3", "--split.critic.cp=2"),
            ],
        ),
    ],
)
def test_a_reference_and_a_critic_share_what_a_trainer_shares(
    run: Run, tmp_path: Path, num_ranks: int, words: list[str]
) -> None:
    """The first KL term is 0 to the bit, and the values of the critic are those of one rank."""
    model = write_mixture(tmp_path / "model", "qwen3_moe")
    common = ("grpo", *STEPS, f"--model={model}", "--trainer.init=folder", "--run.row_shards=2")
    learns = ("--algorithm=ppo", "--critic.init=random", "--critic.lr=1e-2", "--kl.coef=0.1")
    shared = run(*common, *learns, *words, nproc=num_ranks, name="shared")
    check_bits(shared)
    alone = run(*common, *learns, name="alone")
    assert shared.metrics[0]["train/kl"] == alone.metrics[0]["train/kl"] == 0
    for name in ("critic/loss", "critic/grad_norm", "train/grad_norm"):
        for row, other in zip(shared.metrics, alone.metrics, strict=True):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """The rank that has no requests."""
    killed = disturbed(tmp_path, "spmd-rl", "--split.infer.tp=2")
    assert strike(killed, AT_STEP_2, kill_rank_1, before_step=4) != 0
    assert re.search(r"lost rank 1 \(.*killed by SIGKILL", killed.output), killed.output


def check_bits(ended: Ended) -> None:
    assert ended.code == 0, ended.sentence
    compared = [row for row in ended.metrics if "onpolicy/compared_tokens" in row]
    assert sum(row["onpolicy/compared_tokens"] for row in compared) > 0
    assert all(row["onpolicy/mismatched_tokens"] == 0 for row in compared)
