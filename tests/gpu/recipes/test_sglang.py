"""SGLang engines on two GPUs in whole runs. SPMD_RL_SGLANG names its interpreter or folder."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.model.read import read_spec
from tests.gpu.recipes.runs import new_run
from tests.system import chaos_processes as processes
from tests.system.kill_resume import Moment, Run

PYTHON = os.environ.get("SPMD_RL_SGLANG", "/tmp/sgl" if Path("/tmp/sgl/sglang").is_dir() else "")
TWO_BESIDE_TWO = [
    "--nproc=4",
    "--split.train.ranks=2",
    "--split.infer.ranks=2",
    "--split.infer.tp=2",
]
MODES = {
    "one": ["grpo", "--nproc=1"],
    "two": ["grpo", "--nproc=2", "--split.infer.tp=2", "--offload.sleep=always"],
    "killed": ["grpo", "--nproc=2", "--split.infer.tp=2"],
    "split": ["grpo", *TWO_BESIDE_TWO],
    "async": ["grpo_async", *TWO_BESIDE_TWO],
}
MORE = {"killed": ["--run.save_every=0"]}
LIMIT_S = 500.0
FOUR = ("split", "async")  # modes that need four GPUs
ENGINE = (
    "--engine.kind=sglang",
    f"--engine.python={PYTHON}",
    "--engine.options.attention_backend=triton",
    "--engine.options.cuda_graph_max_bs_decode=16",
    "--engine.options.max_total_tokens=65536",
    "--run.exact=false",
    "--run.verify_every=1",
)
NEAR = 0.02  # mean abs(dlogp) of bfloat16 from other kernels, with weights as large as these
AT_STEP_2 = Moment(1, 0, within="step_00002.jsonl")

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(
        not PYTHON and importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: SPMD_RL_SGLANG names its interpreter or folder",
    ),
]


def kill_engine_of_rank_1(launcher: int, mark: str) -> None:
    rank = processes.ranks(mark, launcher)[1]
    (child,) = [
        int(one.name)
        for one in Path("/proc").iterdir()
        if one.name.isdigit()
        and processes.parent(int(one.name)) == rank
        and b"sglang" in (one / "cmdline").read_bytes()
    ]
    os.kill(child, signal.SIGKILL)


def run_of(folder: Path, mode: str) -> Run:
    run = new_run(folder, mode, MODES[mode], *ENGINE, *MORE.get(mode, ()))
    run.limit_s = LIMIT_S
    run.words = [word for word in run.words if not word.startswith("--engine.num_pages")]
    return run


@pytest.fixture(scope="module")
def ended(folder: Path) -> Callable[[str], Run]:
    """Return the run of a mode, ended. Runs do not overlap: their kernels wait for each other."""

    @cache
    def of(mode: str) -> Run:
        run = run_of(folder, mode)
        if mode == "killed":
            run.meet(AT_STEP_2, kill_engine_of_rank_1)
        else:
            run.finish()
        return run

    return of


def metrics(run: Run) -> list[dict[str, Any]]:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("mode", ["one", "two", *FOUR])
def test_tokens_are_near_the_trainers(ended: Callable[[str], Run], folder: Path, mode: str) -> None:
    """Each rank's part of the weights is compared in every push."""
    if mode in FOUR and torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    num_tensors = len(read_spec(folder / "model").parameter_shapes())
    rows = metrics(ended(mode))
    assert len(rows) == 5
    for row in rows:
        assert row["sync/verified_tensors"] == num_tensors * (1 if mode == "one" else 2)
        assert mode == "async" or 0 < row["onpolicy/mean_abs_dlogp"] < NEAR
    print(mode, [row.get("onpolicy/mean_abs_dlogp") for row in rows])


def test_the_end_of_the_second_ranks_child_is_named(ended: Callable[[str], Run]) -> None:
    sentence = ended("killed").output.strip().splitlines()[-1]
    assert "the SGLang process of rank 1 (pid " in sentence
