"""Reward functions that do to their process what a function should not: the run ends as it would
have without.
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

def leaves_at_once(prompt, sample):
    if prompt.uid >= 17 and os.environ["RANK"] in os.environ["LEAVING"]:
        os._exit(0)
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


def test_a_child_that_stays_is_named_and_ended(run: Any, tmp_path: Path) -> None:
    ended = run("grpo", f"--reward={_file(tmp_path)}:a_child_that_stays", "--steps=1")
    pid = int((tmp_path / "stays").read_text())
    assert ended.code == 0, ended.sentence
    assert (
        f"processes that the ranks forked still ran after the run and were killed: pid {pid} ("
        in ended.sentence
    )
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
    ("num_ranks", "leaving", "words"),
    [
        pytest.param(1, "0", [], marks=pytest.mark.system),
        (1, "0", ["--max-restarts=1"]),
        (2, "0", []),
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
    words = [
        f"--reward={_file(tmp_path)}:leaves_at_once",
        "--steps=9",
        "--run.save_every=1",
        *words,
    ]
    ended = run("grpo", *words, nproc=num_ranks)
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
