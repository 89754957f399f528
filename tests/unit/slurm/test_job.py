"""The batch script itself, run by bash with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from spmd_rl.controller.channel import secret
from spmd_rl.slurm.script import Job, render

SCONTROL = """#!/bin/bash
echo "$*" >>"$RECORD/scontrol"
case "$1 $2" in
"show node") echo "NodeName=$4 Arch=x86_64 NodeAddr=10.0.0.${4#n} NodeHostName=$4" ;;
"show job") echo "JobId=7 JobState=$STATE Requeue=$REQUEUE PreemptTime=$PREEMPTED End=None" ;;
esac
"""
# Runs the node's command for both nodes, after noting what the secret's file looks like; then ends
# as it is told.
SRUN = """#!/bin/bash
stat -c %a "$SPMD_RL_SECRET_FILE" >"$RECORD/mode"
cp "$SPMD_RL_SECRET_FILE" "$RECORD/secret"
while [[ $1 != bash ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURMD_NODENAME=n$((node + 1)) "$@"; done
[[ -n ${NOTICE:-} ]] && kill -"$NOTICE" "$PPID" && sleep 0.3
[[ -n ${UNDONE:-} ]] || touch "$SPMD_RL_DONE_FILE"
exit "$CODE"
"""
SCANCEL = """#!/bin/bash
echo "$*" >>"$RECORD/scancel"
"""
PYTHON = """#!/bin/bash
[[ $1 == -c ]] && exec {python} "$@"
printf '%s\\n' "$@" >"$RECORD/torchrun_$SLURM_NODEID"
"""


@dataclass(frozen=True)
class Ended:
    """What a finished script leaves to look at."""

    code: int
    output: str
    record: Path
    logs: Path

    def calls(self, command: str) -> str:
        path = self.record / command
        return path.read_text() if path.exists() else ""

    @property
    def requeued(self) -> bool:
        return "requeue 7" in self.calls("scontrol")


def run(folder: Path, *words: str, code: int = 0, **environment: str) -> Ended:
    """The job 7 on two nodes, whose step ends with `code`."""
    stand_ins, record = folder / "bin", folder / "record"
    stand_ins.mkdir()
    record.mkdir()
    for name, text in {
        "scontrol": SCONTROL,
        "srun": SRUN,
        "scancel": SCANCEL,
        "python": PYTHON,
    }.items():
        (stand_ins / name).write_text(
            text.format(python=sys.executable) if name == "python" else text
        )
        (stand_ins / name).chmod(0o755)
    job = Job(
        words, folder / "the run", str(stand_ins / "python"), nproc=2, max_restarts=1, options={}
    )
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n1",
    }
    job_state = {
        "STATE": "RUNNING",
        "REQUEUE": "1",
        "PREEMPTED": "None",
        "CODE": str(code),
        "RECORD": str(record),
    }
    path = {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-s"],
        input=render(job),
        env=path | slurm | job_state | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, record, job.folder / "logs")


def test_every_node_starts_its_torchrun(tmp_path: Path) -> None:
    ended = run(tmp_path, "recipe.py", "--note=two words\nand a line")
    assert ended.code == 0, ended.output
    assert "10.0.0.1:" in ended.output
    assert ended.logs.parent.stat().st_mode & 0o777 == 0o700
    assert not list(ended.logs.glob(".done*"))
    words = (ended.record / "torchrun_1").read_text()
    for word in (
        "--nnodes=2",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--rdzv-id=7-0",
        "--rdzv-conf=is_host=0",
    ):
        assert word in words.splitlines()
    assert "--local-addr=10.0.0.2" in words
    assert words.endswith("-m\nspmd_rl\nrun\nrecipe.py\n--note=two words\nand a line\n")
    assert "--rdzv-conf=is_host=1" in (ended.record / "torchrun_0").read_text()


def test_the_secret_is_one_the_runtime_takes_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run(tmp_path, "recipe.py", SPMD_RL_SECRET="not this one")
    assert (ended.record / "mode").read_text().strip() == "600"
    text = (ended.record / "secret").read_text()
    assert text not in ended.output
    assert not list(ended.logs.glob(".secret*"))
    copy = tmp_path / "copy"
    copy.write_text(text)
    copy.chmod(0o600)
    monkeypatch.delenv(secret.SECRET_ENV, raising=False)
    monkeypatch.setenv(secret.FILE_ENV, str(copy))
    assert secret.from_environment() == bytes.fromhex(text)


def test_a_failure_is_passed_on_with_the_ranks_last_words(tmp_path: Path) -> None:
    errors = {
        "7-0_abc/attempt_0/1": 'rank 1 \\"fell\\"',
        "7-0_abc/attempt_0/0": "lost rank 1",
        "77-0_x/attempt_0/0": "no",
    }
    for place, sentence in errors.items():
        file = tmp_path / "the run/logs/torchrun" / place / "error.json"
        file.parent.mkdir(parents=True)
        file.write_text(f'{{"message": "{sentence}", "timestamp": 1}}')
        os.utime(file, (1, 1 if "1" in place[-1] else 2))
    ended = run(tmp_path, "recipe.py", code=3)
    assert ended.code == 3
    assert ended.output.splitlines()[-3:] == [
        "attempt 7-0 ended with exit code 3",
        'rank 1 \\"fell\\"',
        "lost rank 1",
    ]
    assert not ended.requeued


def test_ranks_that_leave_with_exit_code_0_before_the_run_is_over_fail_the_job(
    tmp_path: Path,
) -> None:
    ended = run(tmp_path, "recipe.py", UNDONE="1")
    assert ended.code == 1
    assert (
        "attempt 7-0: the ranks ended with exit code 0 before the run was finished\n"
        "attempt 7-0 ended with exit" in ended.output
    )
    assert not ended.requeued


@pytest.mark.parametrize(
    ("environment", "requeued"),
    [
        ({"NOTICE": "USR1"}, True),
        ({"NOTICE": "USR1", "REQUEUE": "0"}, False),
        ({"NOTICE": "USR1", "STATE": "CANCELLED"}, False),
        ({"NOTICE": "TERM"}, False),
        ({"NOTICE": "TERM", "PREEMPTED": "2026-01-02T03:04:05"}, True),
        ({"PREEMPTED": "2026-01-02T03:04:05"}, True),
        ({"PREEMPTED": "2026-01-02T03:04:05", "REQUEUE": "0"}, False),
        ({}, False),
    ],
)
def test_only_a_life_that_slurm_cut_short_is_queued_again(
    tmp_path: Path, environment: dict[str, str], requeued: bool
) -> None:
    ended = run(tmp_path, "recipe.py", code=1, **environment)
    assert ended.code == 1
    assert ended.requeued is requeued
    assert bool(ended.calls("scancel")) is (environment.get("NOTICE") == "USR1")


def test_a_run_that_ends_well_is_never_queued_again(tmp_path: Path) -> None:
    ended = run(tmp_path, "recipe.py", NOTICE=signal.SIGUSR1.name.removeprefix("SIG"))
    assert ended.code == 0
    assert ended.calls("scancel") == "--signal=TERM 7\n"
    assert not ended.requeued
