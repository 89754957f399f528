"""Small runs, one or two ranks on GPUs, alike but for what a test says; several at a time. What
they compute in is left to the machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tests.system.kill_resume import EXAMPLE, MODES, SMALL, Outcome, Run

T = TypeVar("T")

# head size 64, four query heads a key-value head: without `deterministic`, their gradients are
# added in any order
HEAD_DIM = 64
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
LIMIT_S = 300.0  # where fourteen workers share a GPU, a run that takes 55 s took more than 120
DISJOINT = ["--split.train.ranks=1", "--split.infer.ranks=1"]


def write_model(folder: Path, **shape: object) -> Path:
    """The example's model folder with another shape: `SHAPE`, but for what is given."""
    shutil.copytree(EXAMPLE / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SHAPE | shape))
    return folder


def new_run(folder: Path, name: str, mode: list[str], *more: str) -> Run:
    """A run of five steps in `folder`, which holds the model."""
    settings = [
        *(f"--model={folder / 'model'}", "--trainer.deterministic=true", "--trainer.lr=1e-3"),
        *("--prompts_per_step=8", "--sampling.num_samples=8", "--sampling.max_tokens=200"),
        *("--engine.num_pages=256", "--engine.max_batch=64"),
    ]
    return Run(folder, [*mode, *SMALL, *settings, *more], name=name, limit_s=LIMIT_S)


def together(tasks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Do all of them at once, and return what they return by name."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        started = {name: pool.submit(task) for name, task in tasks.items()}
        return {name: one.result() for name, one in started.items()}


def without_push(outcome: Outcome) -> Outcome:
    """The same without the counts of pushed tensors, which follow from how ranks share them."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith("sync/")}
        for row in outcome.metrics
    ]
    return replace(outcome, metrics=rows)


def proof(run: Run) -> list[tuple[int, int]]:
    """Compared and mismatched tokens of each step."""
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (int(row["onpolicy/compared_tokens"]), int(row["onpolicy/mismatched_tokens"]))
        for row in rows
    ]


ONE_GPU = {"sync": ["grpo", "--nproc=1"], "async": ["grpo_async", "--nproc=1"]}
TWO_GPUS = {
    "sharded": MODES["sharded"],
    "split": ["grpo", "--nproc=2", *DISJOINT],
    "async": MODES["async"],
}
