"""The recipes that write or read other data than prompts: rejection sampling and pre-training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import EXAMPLE

pytestmark = pytest.mark.dist

EVEN = f"{Path(__file__).parents[2] / 'system/even.py'}:even"
KEEP_ALL = ("--run.save_every=1", "--run.keep_checkpoints=9")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with random weights, of which some samples end by themselves."""
    source = EXAMPLE / "model"
    folder = tmp_path / "model"
    save_folder(folder, source, random_weights(read_spec(source), 0))
    return folder


def forget_after(folder: Path, step: int) -> Path:
    """Remove the checkpoints after a step, as if the run had been killed; return that step's."""
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return folder / f"checkpoints/step_{step:06d}"


def test_rejection_sampling_writes_each_line_once(run: Any, model: Path) -> None:
    words = (
        "rejection_sampling",
        f"--model={model}",
        f"--data={EXAMPLE / 'train.jsonl'}@[:30]",
        f"--reward={EVEN}",
        "--threshold=0.4",
        "--prompts_per_step=8",
        "--sampling.max_tokens=12",
        *KEEP_ALL,
    )
    whole = run(*words, nproc=2, small=False, draws=True)
    assert whole.code == 0, whole.sentence
    file = whole.folder / "sft.jsonl"
    written = file.read_bytes()
    lines = [json.loads(line) for line in written.splitlines()]
    assert len(lines) > 10
    assert all(line.keys() == {"prompt", "answer", "reward", "meta"} for line in lines)
    assert min(line["reward"] for line in lines) >= 0.4
    assert len({(line["prompt"], line["answer"]) for line in lines}) == len(lines)
    assert f"holds {len(lines)} answers to 30 prompts" in whole.output
    assert [len(whole.samples(step)) for step in range(1, 5)] == [64, 64, 64, 48]
    last = whole.metrics[-1]
    assert last["rejection/kept_samples"] == len(lines)
    assert 0 < last["rejection/solved"] <= 1

    forget_after(whole.folder, 2)
    assert run(*words, nproc=2, small=False).code == 0
    assert file.read_bytes() == written

    # a checkpoint that has lost its place in the file shows
    state = forget_after(whole.folder, 2) / "state.json"
    record = json.loads(state.read_text())
    record["states"]["file"]["bytes"] = 0
    state.write_text(json.dumps(record))
    assert run(*words, nproc=2, small=False).code == 0
    assert file.read_bytes() != written

    file.write_bytes(written)
    learned = run(
        "sft",
        f"--model={model}",
        f"--data={file}",
        "--steps=1",
        "--pairs_per_step=8",
        name="sft",
        small=False,
    )
    assert learned.code == 0, learned.sentence


def test_pretraining_resumes_within_a_document(run: Any, tmp_path: Path) -> None:
    data = tmp_path / "digits.txt"
    data.write_text("\n\n".join(f"{i}+{i}={2 * i}" * (1 + i % 7) for i in range(40)))
    words = (
        "pretrain",
        f"--model={EXAMPLE / 'model'}",
        f"--data={data}",
        "--trainer.init=random",
        "--trainer.lr=1e-2",
        "--trainer.max_tokens=64",
        "--documents.max_tokens=16",
        "--tokens_per_step=100",
        "--steps=5",
        *KEEP_ALL,
    )
    whole = run(*words, nproc=2, small=False, draws=True)
    assert whole.code == 0, whole.sentence
    weights = load_file(whole.folder / "hf/model.safetensors")
    assert whole.metrics[0]["train/loss"] > whole.metrics[-1]["train/loss"]
    assert whole.metrics[-1]["data/epoch"] > 0.1
    assert all(90 < row["data/learned_tokens"] <= 100 for row in whole.metrics)

    state = forget_after(whole.folder, 2) / "state.json"
    assert json.loads(state.read_text())["states"]["documents"]["position"] > 0
    shutil.rmtree(whole.folder / "hf")
    assert run(*words, nproc=2, small=False).code == 0
    resumed = load_file(whole.folder / "hf/model.safetensors")
    assert all((resumed[name] == weights[name]).all() for name in weights)
