"""Reward functions that do to their process what a function should not, and ranks that leave: the
run ends as it should.
"""

from __future__ import annotations

import os
import re
import select
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

LAST_RESORT_S = 600.0

FUNCTIONS = """
import ctypes, multiprocessing, os, sys, tempfile, time
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

def processes_and_threads(prompt, sample):
    a_process_with_a_time_limit(prompt)
    a_request_that_nobody_answers(prompt)
    return float(sample.index)

def a_process_with_a_time_limit(prompt):
    if prompt.uid == 3:
        judge = FORK.Process(target=time.sleep, args=(60,))
        judge.start()
        judge.terminate()
        judge.join(20)
        assert judge.exitcode == -15

def a_request_that_nobody_answers(prompt):
    pools or pools.append(ThreadPoolExecutor(1))
    if prompt.uid == 3:
        pools[0].submit(time.sleep, 1000)

def executor_in_another_directory(prompt, sample):
    os.chdir(tempfile.mkdtemp())
    return executor(prompt, sample)

def a_child_that_comes_back(prompt, sample):
    if prompt.uid == 3:
        os.fork()
    return float(sample.index)

def a_child_that_stays(prompt, sample):
    if prompt.uid == 3 and sample.index == 0 and not os.fork():
        with open("stays", "w") as file:
            print(os.getpid(), file=file)
        time.sleep(1000)
    return float(sample.index)

def leaves(prompt, sample):
    sys.exit(0)

def exits(prompt, sample):
    if (prompt.uid, sample.index) == (3, 2):
        os._exit(1)
    return float(sample.index)

def crashes(prompt, sample):
    if (prompt.uid, sample.index) == (3, 2):
        ctypes.string_at(0)
    return float(sample.index)

def hangs(prompt, sample):
    if (prompt.uid, sample.index) == (3, 2):
        time.sleep(1000)
    return float(sample.index)

def no_text(prompt, sample):
    raise ValueError("half of a pair: \\ud800")
"""


@pytest.mark.parametrize("function", ["executor_in_another_directory", "processes_and_threads"])
def test_the_run_goes_on(run: Any, tmp_path: Path, function: str) -> None:
    ended = run(
        "grpo", f"--reward={_file(tmp_path)}:{function}", "--steps=2", "--run.save_every=1", nproc=2
    )
    assert ended.code == 0, ended.sentence
    assert (ended.folder / "checkpoints/step_000001/trainer").is_dir()


def test_a_child_that_comes_back_ends(run: Any, tmp_path: Path) -> None:
    ended = run("grpo", f"--reward={_file(tmp_path)}:a_child_that_comes_back", "--steps=2", nproc=2)
    assert (ended.code, ended.sentence) == (0, ""), "no child is there to be named"


def test_a_child_that_stays_ends_with_the_run(run: Any, tmp_path: Path) -> None:
    ended = run("grpo", f"--reward={_file(tmp_path)}:a_child_that_stays", "--steps=1")
    pid = int((tmp_path / "stays").read_text())
    assert (ended.code, ended.sentence) == (0, "")
    with suppress(ProcessLookupError):  # it is gone already
        witness = os.pidfd_open(pid)
        assert select.select([witness], [], [], LAST_RESORT_S)[0], "it got SIGKILL"
        os.close(witness)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("executor_then_error", "raised ValueError: poisoned"),
        ("leaves", "raised SystemExit: 0"),
        ("no_text", r"raised ValueError: half of a pair: \ud800"),
    ],
)
def test_the_run_ends_with_what_the_function_did(
    run: Any, tmp_path: Path, function: str, sentence: str
) -> None:
    ended = run("grpo", f"--reward={_file(tmp_path)}:{function}", "--steps=2", nproc=2)
    assert ended.code == 2
    assert sentence in ended.sentence


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param("exits", [], marks=pytest.mark.system),
        ("crashes", []),
        ("hangs", ["--hooks.deadline_s=8"]),
    ],
)
def test_what_ends_its_process_costs_its_sample_only(
    run: Any, tmp_path: Path, function: str, words: list[str]
) -> None:
    words = [f"--reward={_file(tmp_path)}:{function}", "--hooks.on_error=fail", *words]
    ended = run("grpo", *words, "--steps=2", nproc=2)
    assert ended.code == 0, ended.sentence
    counted = [(row["reward/failed_samples"], row["reward/failed_groups"]) for row in ended.metrics]
    assert counted == [(1, 0), (0, 0)]
    failed = [row for row in ended.samples(1) if row["status"] == "failed"]
    assert [(row["prompt_uid"], row["index"]) for row in failed] == [(3, 2)]
    assert "on prompt 3 sample 2 (" in failed[0]["metadata"]["error"]


LEAVING = """
import os
import spmd_rl as rl

class Leaving(rl.Rollout):
    def pump(self):
        \"\"\"Leave in the third step.\"\"\"
        uids = [group.prompt.uid for group in self._flow._open.values()]
        if max(uids, default=0) >= 17 and os.environ["RANK"] in os.environ["LEAVING"]:
            os._exit(0)
        super().pump()
"""
LEAVING_RECIPE = """
from leaving import Leaving
from spmd_rl.recipes import policy_run
from spmd_rl.recipes.grpo import Config, check, main

policy_run.Rollout = Leaving
"""


@pytest.mark.parametrize(
    ("num_ranks", "leaving", "words"),
    [
        pytest.param(1, "0", [], marks=pytest.mark.system),
        (1, "0", ["--max-restarts=1"]),
        pytest.param(2, "0", [], marks=pytest.mark.system),
        pytest.param(2, "1", [], marks=pytest.mark.system),
        (2, "01", ["--max-restarts=1"]),
    ],
)
def test_a_rank_that_leaves_with_exit_code_0_is_lost(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    leaving: str,
    words: list[str],
) -> None:
    monkeypatch.setenv("LEAVING", leaving)
    (tmp_path / "leaving.py").write_text(LEAVING)
    (tmp_path / "recipe.py").write_text(LEAVING_RECIPE)
    ended = run("recipe.py", "--steps=9", "--run.save_every=1", *words, nproc=num_ranks)
    assert ended.code == 1
    assert re.match(
        rf"lost rank [{leaving}] \(host \S+, pid \d+\), .* in infer.generate", ended.sentence
    )
    assert (
        "; the same command goes on after step 1" in ended.sentence
        or "after step 2" in ended.sentence
    )


def _file(folder: Path) -> Path:
    path = folder / "rules.py"
    path.write_text(FUNCTIONS)
    return path
