"""Evaluations in whole runs: training goes on as without them, and each is recorded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.observe.metrics_log import read_metrics
from tests.dist.recipes.conftest import EXAMPLE, Ended, Run

pytestmark = pytest.mark.dist

REWARDS = """
def first_letter(prompt, sample):
    return float(sample.text[:1] in "0123")

def length(prompt, sample):
    return len(sample.text) / 4
"""
# of the machine and the time, and of pushes
OTHER = ("time/", "engine/", "perf/", "before/", "memory/", "rollout/tokens_per_s", "unix_s")


def training(ended: Ended) -> list[dict[str, Any]]:
    """What a run learned in each step, without times and evaluations."""
    rows = read_metrics(ended.folder / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if not name.startswith((*OTHER, "eval/"))}
        for row in rows
        if row["step"] > 0
    ]


def lines_of_evaluations(ended: Ended) -> list[int]:
    lines = (ended.folder / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "eval/reward" in row]


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


def evaluated(run: Run, checkpoint: Path, *words: str) -> dict[str, Any]:
    """The scores of a checkpoint, from `spmd-rl run evaluate`."""
    ended = run(
        "evaluate",
        f"--model={EXAMPLE / 'model'}",
        "--sampling.max_tokens=4",
        "--sampling.num_samples=2",
        f"--checkpoint={checkpoint}",
        *words,
        name="evaluated",
        small=False,
    )
    assert ended.code == 0
    found: dict[str, Any] = json.loads((ended.folder / "eval.json").read_text())
    return found


def test_evaluations_leave_training_as_it_is_and_are_each_made_once(run: Run, rewards: str) -> None:
    words = [f"--reward={rewards}:first_letter", "--run.save_every=1"]
    evaluations = [
        "--eval.every=1",
        "--eval.num_samples=2",
        f"--eval.sets.same.data={EXAMPLE / 'eval.jsonl'}@[0:9]",
        f"--eval.sets.other.data={EXAMPLE / 'eval.jsonl'}@[0:5]",
        f"--eval.sets.other.reward={rewards}:length",
        "--eval.sets.other.sampling.temperature=0",
    ]
    alone = run("grpo", *words, "--steps=3", nproc=2, name="alone")
    run("grpo", *words, *evaluations, "--steps=2", nproc=2, name="watched")
    watched = run(
        "grpo", *words, *evaluations, "--steps=3", "--run.resume=true", nproc=2, name="watched"
    )
    assert (alone.code, watched.code) == (0, 0)
    assert lines_of_evaluations(watched) == [0, 1, 2, 3]
    assert any(row["train/grad_norm"] > 0 for row in training(alone)), "something is learned"
    assert training(watched) == training(alone)
    weights = [ended.folder / "hf/model.safetensors" for ended in (alone, watched)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    names = {path.name for path in (watched.folder / "samples").glob("eval_*")}
    assert names == {
        f"eval_{one}_step_0000{n}.jsonl" for one in ("same", "other") for n in range(4)
    }
    scores = evaluated(
        run,
        watched.folder / "checkpoints/step_000003",
        f"--data={EXAMPLE / 'eval.jsonl'}@[0:9]",
        f"--reward={rewards}:first_letter",
    )
    last = read_metrics(watched.folder / "metrics.jsonl")[-1]
    assert (scores["version"], last["step"]) == (3, 3)
    assert scores["sets"]["eval"]["reward"] == last["eval/same/reward"]
    ended = run("evaluate", f"--config={watched.folder}", name="as_run", small=False)
    assert ended.code == 0, ended.sentence
    assert f"evaluating the weights of {watched.folder}/checkpoints/step_000003\n" in ended.output
    found = json.loads((ended.folder / "eval.json").read_text())["sets"]
    for name in ("same", "other"):
        assert found[name] == {key: last[f"eval/{name}/{key}"] for key in found[name]}


def test_evaluations_beside_engines_that_never_pause_have_one_version(
    run: Run, rewards: str
) -> None:
    ended = run(
        "grpo_fully_async",
        f"--reward={rewards}:first_letter",
        "--steps=3",
        "--eval.every=2",
        f"--eval.data={EXAMPLE / 'eval.jsonl'}@[0:9]",
        nproc=2,
    )
    assert ended.code == 0
    assert lines_of_evaluations(ended) == [0, 2, 3]
    for num_steps in (0, 2, 3):
        path = ended.folder / f"samples/eval_eval_step_{num_steps:05d}.jsonl"
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(samples) == 9
        assert {version for sample in samples for version in sample["versions"]} == {num_steps}
