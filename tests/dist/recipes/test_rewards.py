"""Reward functions that do to their process what a function should not: the run ends as it would have without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

FUNCTIONS = """
import multiprocessing, os, sys, tempfile, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
FORK = multiprocessing.get_context("fork")
pools = []

def executor(prompt, sample):
    pools or pools.append(ProcessPoolExecutor(1, mp_context=FORK))
    return pools[0].submit(float, sample.index).result()

def executor_then_error(prompt, sample):
    if prompt.uid == 3:
        raise ValueError("poisoned")
    return executor(prompt, sample)

def process_with_a_time_limit(prompt, sample):
    if prompt.uid == 3:
        judge = FORK.Process(target=time.sleep, args=(60,))
        judge.start()
        judge.terminate()
        judge.join(20)
        assert judge.exitcode == -15
    return float(sample.index)

def a_request_that_nobody_answers(prompt, sample):
    pools or pools.append(ThreadPoolExecutor(1))
    if prompt.uid == 3:
        pools[0].submit(time.sleep, 1000)
    return float(sample.index)

def another_directory(prompt, sample):
    os.chdir(tempfile.mkdtemp())
    return float(sample.index)

def leaves(prompt, sample):
    sys.exit(0)

def no_text(prompt, sample):
    raise ValueError("half of a pair: \\ud800")
"""


GO_ON = ["executor", "process_with_a_time_limit", "a_request_that_nobody_answers", "another_directory"]


@pytest.mark.parametrize("function", GO_ON)
def test_the_run_goes_on(run: Any, tmp_path: Path, function: str) -> None:
    ended = run("grpo", f"--reward={_file(tmp_path)}:{function}", "--steps=2", "--run.save_every=1", nproc=2)
    assert ended.code == 0, ended.sentence
    assert (ended.folder / "checkpoints/step_000001/trainer").is_dir()


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("executor_then_error", "raised ValueError: poisoned"),
        ("leaves", "raised SystemExit: 0"),
        ("no_text", r"raised ValueError: half of a pair: \ud800"),
    ],
)
def test_the_run_ends_with_what_the_function_did(run: Any, tmp_path: Path, function: str, sentence: str) -> None:
    ended = run("grpo", f"--reward={_file(tmp_path)}:{function}", "--steps=2", nproc=2)
    assert ended.code == 2
    assert sentence in ended.sentence


def _file(folder: Path) -> Path:
    path = folder / "rules.py"
    path.write_text(FUNCTIONS)
    return path
