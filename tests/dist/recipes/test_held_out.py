"""Evaluations on held-out data in recipes without an engine, in whole runs on real ranks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.train.command import main as export
from tests.dist.recipes.conftest import EXAMPLE, Ended, Run
from tests.dist.recipes.test_data_recipes import KEEP_ALL, forget_after
from tests.dist.recipes.test_evaluation import training

pytestmark = pytest.mark.dist

TRAINING = ("--steps=3", "--trainer.lr=1e-2", "--trainer.max_tokens=64", "--run.save_every=1")
ANSWERS = (f"--data={EXAMPLE / 'train.jsonl'}", "--pairs_per_step=8")
PAIRS = (f"--data={EXAMPLE / 'pairs.jsonl'}", "--pairs_per_step=6")
# one record is fewer than there are ranks
SETS = {
    "sft": ("eval.jsonl", ("loss", "perplexity", "token_accuracy")),
    "dpo": ("eval_pairs.jsonl", ("accuracy", "margin")),
    "reward_model": ("eval_pairs.jsonl", ("accuracy", "margin")),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = EXAMPLE / "model"
    save_folder(tmp_path / "model", source, random_weights(read_spec(source), 0))
    return tmp_path / "model"


def evaluations(ended: Ended) -> dict[int, dict[str, float]]:
    """The scores of each evaluation by the number of steps, each of which is recorded once."""
    lines = (ended.folder / "metrics.jsonl").read_text().splitlines()
    found = [
        (row["step"], {name: value for name, value in row.items() if name.startswith("eval/")})
        for row in map(json.loads, lines)
        if any(name.startswith("eval/") for name in row)
    ]
    assert len({step for step, _ in found}) == len(found)
    return dict(found)


def weights(ended: Ended) -> bytes:
    return (ended.folder / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "recipe",
    [
        "sft",
        pytest.param("dpo", marks=pytest.mark.system),
        pytest.param("reward_model", marks=pytest.mark.system),
    ],
)
def test_training_goes_on_bit_for_bit_as_without(run: Run, model: Path, recipe: str) -> None:
    """The evaluated run is also ended and resumed, and neither repeats nor misses an evaluation."""
    file, scores = SETS[recipe]
    words = (recipe, f"--model={model}", *(ANSWERS if recipe == "sft" else PAIRS), *TRAINING)
    evaluated = (
        "--eval.every=1",
        f"--eval.sets.many.data={EXAMPLE / file}@[:20]",
        f"--eval.sets.one.data={EXAMPLE / file}@[:1]",
    )
    alone = run(*words, nproc=2, name="alone", small=False)
    run(*words, *evaluated, "--steps=2", nproc=2, name="watched", small=False)
    watched = run(*words, *evaluated, "--run.resume=true", nproc=2, name="watched", small=False)
    assert (alone.code, watched.code) == (0, 0), watched.sentence
    found = evaluations(watched)
    assert [*found] == [0, 1, 2, 3]
    for name in scores:
        assert all(
            math.isfinite(row[f"eval/{one}/{name}"])
            for row in found.values()
            for one in ("many", "one")
        )
    main = scores[0]
    assert found[0][f"eval/many/{main}"] != found[3][f"eval/many/{main}"], "something is learned"
    assert found[3][f"eval/{main}"] == pytest.approx(
        (found[3][f"eval/many/{main}"] + found[3][f"eval/one/{main}"]) / 2
    )
    assert training(watched) == training(alone)
    assert weights(watched) == weights(alone)


def test_pretraining_counts_each_held_out_token_once(run: Run, tmp_path: Path) -> None:
    documents = [f"{i}+{i}={2 * i}" * (1 + i % 7) for i in range(20)]
    data = tmp_path / "digits.txt"
    data.write_text("\n\n".join(documents))
    words = (
        "pretrain",
        f"--model={EXAMPLE / 'model'}",
        f"--data={data}",
        "--trainer.init=random",
        "--documents.max_tokens=16",
        "--tokens_per_step=100",
        *TRAINING,
    )
    evaluated = ("--eval.sets.text.data=" + str(data), "--eval.sets.cut.data=" + str(data))
    alone = run(*words, nproc=2, name="alone", small=False)
    watched = run(
        *words, *evaluated, "--eval.sets.cut.documents.max_tokens=8", nproc=2, name="w", small=False
    )
    assert (alone.code, watched.code) == (0, 0), watched.sentence
    assert training(watched) == training(alone)
    assert weights(watched) == weights(alone)
    found = evaluations(watched)
    assert [*found] == [0, 3]
    assert found[3]["eval/text/loss"] < found[0]["eval/text/loss"]
    assert found[3]["eval/text/token_accuracy"] > found[0]["eval/text/token_accuracy"]
    assert found[3]["eval/cut/loss"] != found[3]["eval/text/loss"], "a piece sees less before it"


def test_distill_evaluates_by_the_teacher_or_by_a_reward(run: Any, model: Path) -> None:
    source = EXAMPLE / "model"
    save_folder(model.parent / "teacher", source, random_weights(read_spec(source), 1))
    words = (
        "distill",
        f"--model={model}",
        f"--teacher={model.parent / 'teacher'}",
        f"--data={EXAMPLE / 'train.jsonl'}",
        "--prompts_per_step=4",
        "--sampling.max_tokens=4",
        "--steps=2",
        "--trainer.lr=1e-2",
    )
    evaluated = (
        f"--eval.sets.gain.data={EXAMPLE / 'eval.jsonl'}@[:9]",
        f"--eval.sets.right.data={EXAMPLE / 'eval.jsonl'}@[:9]",
        f"--eval.sets.right.reward={EXAMPLE / 'reward.py'}:correct",
        "--eval.sets.right.prompts.answer_key=answer",
    )
    alone = run(*words, nproc=2, name="alone", small=False)
    watched = run(*words, *evaluated, nproc=2, name="watched", small=False, draws=True)
    assert (alone.code, watched.code) == (0, 0), watched.sentence
    assert training(watched) == training(alone)
    assert weights(watched) == weights(alone)
    found = evaluations(watched)
    assert [*found] == [0, 2]
    assert found[0]["eval/gain/reward"] < 0, "the teacher finds other tokens likelier"
    assert 0 <= found[0]["eval/right/reward"] <= 1


def test_a_run_ends_early_and_its_best_weights_are_exported(
    run: Run, model: Path, tmp_path: Path
) -> None:
    """A rate of 1 ruins the weights at once: none are better than the first."""
    words = ("sft", f"--model={model}", *ANSWERS, "--steps=9", "--trainer.lr=1")
    words += (f"--eval.data={EXAMPLE / 'eval.jsonl'}@[:9]", "--eval.every=1", "--run.save_every=0")
    words += ("--run.best=eval/eval/loss", "--run.patience=2")
    first = run(*words, nproc=1, name="r", small=False)
    assert first.code == 0, first.sentence
    scores = {step: found["eval/loss"] for step, found in evaluations(first).items()}
    assert [*scores] == [0, 1, 2, 3], "the last is that of the weights at the end"
    assert min(scores, key=lambda step: scores[step]) == 0
    sentence = "eval/eval/loss was best after step 0"
    assert sentence in first.output
    assert "ends after step 3 (run.patience)" in first.output
    best = min((1, 2, 3), key=lambda step: scores[step])
    saved = sorted(path.name for path in (first.folder / "checkpoints").iterdir())
    assert f"step_{best:06d}" in saved
    assert "step_000003" in saved
    again = run(*words, nproc=1, name="r", small=False)
    assert again.code == 0
    assert sentence in again.output
    assert evaluations(again) == evaluations(first)
    assert export([str(first.folder), str(tmp_path / "best"), "--step=best"]) == 0
    assert export([str(first.folder), str(tmp_path / "named"), f"--step={best}"]) == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("best", "named")]
    assert files[0] == files[1]


def test_a_run_begins_at_a_later_step_with_the_data_and_the_rate_of_that_step(
    run: Run, model: Path
) -> None:
    schedule = ("--trainer.schedule=linear", "--trainer.total_steps=4", "--steps=4")
    words = ("sft", f"--model={model}", *ANSWERS, *schedule, "--trainer.lr=1e-2")
    evaluated = (f"--eval.data={EXAMPLE / 'eval.jsonl'}@[:9]", *KEEP_ALL)
    whole = run(*words, nproc=2, name="whole", small=False)
    started = (*words, *evaluated, "--start_step=2", "--run.resume=true")
    late = run(*started, nproc=2, name="late", small=False)
    assert (whole.code, late.code) == (0, 0), late.sentence
    rows = {row["step"]: row for row in read_metrics(late.folder / "metrics.jsonl")}
    assert [*rows] == [2, 3, 4]
    of_whole = {row["step"]: row for row in whole.metrics}
    for step in (3, 4):
        for name in ("train/lr", "train/tokens"):
            assert rows[step][name] == of_whole[step][name]
    assert rows[3]["train/lr"] == pytest.approx(1e-2 / 2)
    assert ["eval/loss" in rows[step] for step in (2, 3, 4)] == [True, False, True]
    learned = weights(late)
    forget_after(late.folder, 3)
    shutil.rmtree(late.folder / "hf")
    again = run(*started, nproc=2, name="late", small=False)
    assert again.code == 0, again.sentence
    assert weights(again) == learned


def test_grpo_begins_at_a_later_step(run: Run) -> None:
    whole = run("grpo", "--steps=3", nproc=1, name="whole")
    late = run("grpo", "--steps=3", "--start_step=2", nproc=1, name="late")
    assert (whole.code, late.code) == (0, 0), late.sentence
    (row,) = late.metrics
    assert row["step"] == 3
    assert row["onpolicy/mismatched_tokens"] == 0
    prompts = [[one["prompt"] for one in ended.samples(3)] for ended in (whole, late)]
    assert prompts[0] == prompts[1]
    assert late.samples(3)[0]["versions"][0] == 2
