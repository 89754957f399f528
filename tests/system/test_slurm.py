"""Jobs of a real Slurm: submitted, cancelled, requeued, preempted, and on a node that fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster import Cluster, until
from tests.system.conftest import ReportSocket, WaitingRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[2]
RECIPE = str(Path(__file__).with_name("witness.py"))
SUBMIT = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.slurm.command import main; sys.exit(main(sys.argv[1:]))",
]
CHECK = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.check.command import main; sys.exit(main(sys.argv[1:]))",
]
NOTE = 'it\'s "$HOME" \\ `id`\n#SBATCH --nodes=1\nétoile'


class JobDriver:
    """Submits the witness recipe from a folder of its own, and observes its job."""

    def __init__(self, cluster: Cluster, report_socket: ReportSocket, folder: Path) -> None:
        self.cluster = cluster
        self.report_socket = report_socket
        self.folder = folder
        self.logs = folder / "runs/witness/logs"
        self.jobs: list[int] = []

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `spmd-rl submit` with the witness recipe."""
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPMD_RL_INTERFACE": "lo"}
        return subprocess.run(
            [*SUBMIT, RECIPE, f"--report_socket={self.report_socket.path}", *words],
            cwd=self.folder,
            env=self.cluster.environment | paths,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def submit(self, *words: str) -> WaitingRun:
        """Submit to two nodes, and return the first call."""
        done = self.run("--nodes=2", "--time=10", *words)
        assert done.returncode == 0, done.stderr
        self.jobs.append(int(done.stdout.split(":")[0].removeprefix("job ")))
        return self.next_run()

    def next_run(self) -> WaitingRun:
        try:
            return self.report_socket.next_run(
                job_ended=lambda: self.state() in ("FAILED", "COMPLETED", "CANCELLED")
            )
        except TimeoutError:
            raise AssertionError(
                f"no call from {self.cluster.job(self.jobs[-1])}\n{self.all_logs()}"
            ) from None

    def all_logs(self) -> str:
        return "".join(
            f"--- {path.name}\n{path.read_text()}" for path in sorted(self.logs.glob("*.log"))
        )

    def job_log(self) -> str:
        return (self.logs / f"slurm_{self.jobs[-1]}.log").read_text()

    def state(self) -> str:
        return self.cluster.job(self.jobs[-1])["JobState"]

    def await_state(self, *states: str) -> dict[str, str]:
        number = self.jobs[-1]
        until(lambda: self.state() in states, f"job {number} in state {states}\n{self.all_logs()}")
        return self.cluster.job(number)

    def release_requeued(self) -> None:
        """Shorten the two minutes that Slurm holds a requeued job, once its first start is over.

        Some of it remains: in the second in which Slurm revokes a credential it accepts no new one.
        """
        job = self.await_state("PENDING")
        until(lambda: not self.cluster.busy(), "no process of the first start left")
        assert job["Restarts"] == "1"
        self.cluster.command("scontrol", "update", f"JobId={self.jobs[-1]}", "StartTime=now+2")

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until Slurm has none left."""
        for number in self.jobs:
            subprocess.run(
                ["scancel", str(number)],
                env=self.cluster.environment,
                capture_output=True,
                check=False,
            )
        queue = ("squeue", "--noheader")
        until(lambda: not self.cluster.command(*queue).strip(), "an empty queue")


@pytest.fixture
def driver(cluster: Cluster, report_socket: ReportSocket, tmp_path: Path) -> Iterator[JobDriver]:
    ours = JobDriver(cluster, report_socket, tmp_path)
    yield ours
    ours.cancel_all()


def test_a_run_over_two_nodes(driver: JobDriver) -> None:
    call = driver.submit(f"--note={NOTE}")
    assert sorted(call.report["nodes"]) == ["n1", "n2"]
    assert call.report["total"] == 2
    assert call.report["note"] == NOTE
    secret = Path(call.report["secret_file"])
    assert call.report["secret_mode"] == "0o600"
    text = secret.read_text()
    call.order("end")
    assert driver.await_state("COMPLETED")["Restarts"] == "0"
    until(lambda: not secret.exists(), "the secret removed")
    for node in ("n1", "n2"):
        assert "a rank has started" in (driver.logs / f"node_{node}.log").read_text()
    script = driver.cluster.command(
        "scontrol", "write", "batch_script", str(call.report["job"]), "-"
    )
    assert text not in driver.all_logs() + script


def test_what_cannot_run_is_refused_before_it_queues(driver: JobDriver) -> None:
    misspelt = driver.run("--nots=x")
    assert "note" in misspelt.stderr
    nowhere = driver.run("--partition=nowhere")
    assert "invalid partition" in nowhere.stderr
    assert misspelt.returncode != 0
    assert nowhere.returncode != 0
    assert not driver.cluster.command("squeue", "--noheader")


def test_a_cancelled_run_ends_and_stays_ended(driver: JobDriver) -> None:
    call = driver.submit()
    driver.cluster.command("scancel", str(call.report["job"]))
    assert driver.await_state("CANCELLED")["Restarts"] == "0"
    until(lambda: not driver.cluster.busy(), "no process of the job left")
    assert "queued again" not in driver.job_log()


def test_a_failed_run_names_its_cause_and_is_not_requeued(driver: JobDriver) -> None:
    call = driver.submit("--max-restarts=0")
    call.order("fail")
    assert driver.await_state("FAILED")["Restarts"] == "0"
    assert "RuntimeError: told to fail" in driver.job_log()


def test_a_killed_rank_restarts_all_ranks_within_the_job(driver: JobDriver) -> None:
    first = driver.submit()
    os.kill(first.report["pids"][1], signal.SIGKILL)
    second = driver.next_run()
    assert second.report["requeues"] == 0
    assert not set(first.report["pids"]) & set(second.report["pids"])
    assert sorted(second.report["nodes"]) == ["n1", "n2"]
    second.order("end")
    driver.await_state("COMPLETED")


def test_a_requeued_run_comes_back_with_a_secret_of_its_own(driver: JobDriver) -> None:
    first = driver.submit()
    driver.cluster.command("scontrol", "requeue", str(first.report["job"]))
    driver.release_requeued()
    second = driver.next_run()
    assert second.report["job"] == first.report["job"]
    assert (first.report["requeues"], second.report["requeues"]) == (0, 1)
    assert first.report["secret_hash"] != second.report["secret_hash"]
    second.order("end")
    driver.await_state("COMPLETED")
    assert driver.job_log().count("of the run on n[1-2]") == 2


def test_a_run_whose_time_is_up_queues_again(driver: JobDriver) -> None:
    first = driver.submit()
    driver.cluster.command("scancel", "--batch", "--signal=USR1", str(first.report["job"]))
    driver.release_requeued()
    second = driver.next_run()
    assert second.report["requeues"] == 1
    second.order("end")
    driver.await_state("COMPLETED")
    assert "queued again" in driver.job_log()


def test_a_run_whose_time_is_up_does_not_queue_again_when_told_not_to(driver: JobDriver) -> None:
    first = driver.submit("--no-requeue")
    driver.cluster.command("scancel", "--batch", "--signal=USR1", str(first.report["job"]))
    assert driver.await_state("FAILED")["Restarts"] == "0"


def test_a_preempted_run_gives_way_and_comes_back(driver: JobDriver) -> None:
    first = driver.submit("--partition=low", "--slurm=--exclusive")
    first.order("go on")
    other = ("--partition=high", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=true")
    driver.cluster.command("sbatch", "--wait", *other)
    driver.release_requeued()
    second = driver.next_run()
    assert second.report["job"] == first.report["job"]
    assert second.report["requeues"] == 1
    assert (first.report["step"], second.report["step"]) == (0, saved_after(driver))
    second.order("end")
    driver.await_state("COMPLETED")


def saved_after(driver: JobDriver) -> int:
    """Return the step after which the run says that it saved before it ended."""
    said = re.search(
        r"got SIGTERM; saved after step (\d+), the same command goes on", driver.all_logs()
    )
    assert said is not None, driver.all_logs()
    return int(said[1])


def test_a_run_moves_off_a_node_that_fails(driver: JobDriver) -> None:
    first = driver.submit()
    assert sorted(first.report["nodes"]) == ["n1", "n2"]
    driver.cluster.kill_node("n2")
    try:
        driver.release_requeued()
        second = driver.next_run()
        assert sorted(second.report["nodes"]) == ["n1", "n3"]
        second.order("end")
        driver.await_state("COMPLETED")
    finally:
        driver.cluster.revive_node("n2")


def test_a_node_that_fails_is_named_when_the_run_may_not_move(driver: JobDriver) -> None:
    driver.submit("--no-requeue")
    driver.cluster.kill_node("n2")
    try:
        job = driver.await_state("NODE_FAIL")
        assert job["Restarts"] == "0"
    finally:
        driver.cluster.revive_node("n2")


def test_check_looks_at_every_node_of_a_job(driver: JobDriver) -> None:
    nodes = ("--nodes=2", "--ntasks-per-node=1", "--label")
    lines = driver.cluster.command(
        "srun", *nodes, *CHECK, f"--run.folder={driver.folder}", PYTHONPATH=str(ROOT)
    )
    for task in ("0", "1"):
        (found,) = [
            line
            for line in lines.splitlines()
            if line.startswith(f"{task}:") and "  slurm  " in line
        ]
        assert "on 2 nodes" in found
