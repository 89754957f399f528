"""Whole runs of the arithmetic example, small ones, each in a process group of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forked_controller import forking
from tests.dist.launched import Launched

REPO = Path(__file__).parents[3]
UNDRAWN = REPO / "tests/fakes/undrawn"
EXAMPLE = REPO / "examples" / "arithmetic"
SMALL = [
    f"--model={EXAMPLE / 'model'}",
    f"--data={EXAMPLE / 'train.jsonl'}",
    f"--reward={EXAMPLE / 'reward.py'}:correct",
    "--prompts_per_step=8",
    "--sampling.num_samples=4",
    "--sampling.max_tokens=4",
    "--trainer.init=random",
    "--trainer.lr=1e-3",
]


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, the last line of stderr, the folder it left, and its stdout."""

    code: int
    sentence: str
    folder: Path
    output: str = ""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of the steps from 1."""
        rows = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]
        return [row for row in rows if row["step"] > 0]

    def samples(self, step: int) -> list[dict[str, Any]]:
        return [
            json.loads(row)
            for row in (self.folder / f"samples/step_{step:05d}.jsonl").read_text().split("\n")[:-1]
        ]


Run = Callable[..., Ended]


def run_in(
    folder: Path,
    recipe: str,
    *words: str,
    nproc: int = 1,
    name: str = "r",
    small: bool = True,
    draws: bool = False,
) -> Ended:
    """Run a recipe to its end in `folder`; `small=False` leaves out the small settings.

    Its curves are drawn only if `draws`.
    """
    command = [
        "run",
        recipe,
        *(SMALL if small else []),
        f"--nproc={nproc}",
        f"--run.name={name}",
        *words,
    ]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("SPMD_RL", "TORCHELASTIC"))
    }
    given = filter(None, [os.environ.get("PYTHONPATH")])
    search = os.pathsep.join(map(str, [*([] if draws else [UNDRAWN]), REPO, *given]))
    paths = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    process = Launched(command, folder, environment | paths, forking)
    try:
        out, err = process.communicate(timeout=1000)
    finally:
        process.end()
    assert process.returncode is not None
    lines = err.strip().splitlines()
    sentence = lines[-1] if lines else ""
    return Ended(process.returncode, sentence, folder / "runs" / name, out)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a recipe to its end in a folder of the test: `run("grpo", "--steps=3", nproc=2)`."""
    return partial(run_in, tmp_path)
