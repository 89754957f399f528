"""A finding for every way in which a host can be unfit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spmd_rl.check import findings
from spmd_rl.check.facts import ClockSkew, Gpus, Network, RunsFolder, SystemLimits, TrialResult
from spmd_rl.check.findings import GIB, HostFinding

NO_GPU = Gpus(num_devices=0, driver="", cuda=None)
TWO = Gpus(num_devices=2, driver="580.1", cuda="13.0", names=("H200", "H200"))
LIMITS = SystemLimits(nofile=65536, memlock_bytes=None, shm_bytes=16 * GIB, num_infiniband=0)
PORTS = Network(host="node1", address="10.0.0.1", first_ephemeral=32768)
FOLDER = RunsFolder(Path("/shared/runs"), free_bytes=500 * GIB, renames=True, keeps_modes=True)
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
}
BROKEN = TrialResult(False, "unhandled system error")
FINE = TrialResult(True, "it works")


CASES = [
    ("ok", "3.12", findings.python((3, 12))),
    ("fail", "3.10", findings.python((3, 10))),
    ("fail", "3.13", findings.python((3, 13))),
    ("ok", "2.13", findings.torch("2.13.0+cpu")),
    ("ok", "2.11", findings.torch("2.11.0")),
    ("fail", "2.10", findings.torch("2.10.1")),
    ("fail", "3.0", findings.torch("3.0.0")),
    ("fail", "not installed", findings.torch(None)),
    ("ok", "CPUs", findings.driver(NO_GPU)),
    ("ok", "2 x H200, driver 580.1, CUDA 13.0", findings.driver(TWO)),
    ("fail", "built for CPUs", findings.driver(replace(TWO, names=(), cuda=None))),
    (
        "fail",
        "torch cannot use them",
        findings.driver(replace(TWO, names=(), error="driver too old")),
    ),
    ("warn", "CUDA_VISIBLE_DEVICES", findings.driver(replace(TWO, names=(), hidden=True))),
    ("ok", "fewer", findings.peers(NO_GPU)),
    ("ok", "every pair", findings.peers(TWO)),
    ("warn", "0-1", findings.peers(replace(TWO, no_peer_access=((0, 1),)))),
    ("ok", "fewer", findings.nccl(None)),
    ("ok", "it works", findings.nccl(FINE)),
    ("fail", "unhandled system error", findings.nccl(BROKEN)),
    ("ok", "no GPU", findings.ipc(None)),
    ("ok", "it works", findings.ipc(FINE)),
    ("fail", "--ipc=host", findings.ipc(BROKEN)),
    ("ok", "65536", findings.files(LIMITS)),
    ("warn", "1024", findings.files(replace(LIMITS, nofile=1024))),
    ("fail", "ulimit -Hn", findings.files(replace(LIMITS, nofile=256))),
    ("ok", "unlimited", findings.memlock(LIMITS)),
    ("ok", "8192 KiB", findings.memlock(replace(LIMITS, memlock_bytes=8 << 20))),
    (
        "fail",
        "ulimit -l",
        findings.memlock(replace(LIMITS, memlock_bytes=8 << 20, num_infiniband=4)),
    ),
    ("ok", "16.0 GiB", findings.shared_memory(LIMITS, 8)),
    ("fail", "0.1 GiB", findings.shared_memory(replace(LIMITS, shm_bytes=64 << 20), 8)),
    ("warn", "0.1 GiB", findings.shared_memory(replace(LIMITS, shm_bytes=64 << 20), 1)),
    ("fail", "no /dev/shm", findings.shared_memory(replace(LIMITS, shm_bytes=None), 0)),
    ("ok", "0.20 s", findings.clock(ClockSkew(0.2, "rank 0 to rank 3 of 8"))),
    ("warn", "rank 0 to rank 3", findings.clock(ClockSkew(2.0, "rank 0 to rank 3 of 8"))),
    ("fail", "chrony", findings.clock(ClockSkew(300.0, "rank 0 to rank 3 of 8"))),
    ("ok", "10.0.0.1", findings.ports(PORTS, 2)),
    ("fail", "ip link", findings.ports(replace(PORTS, loopback_error="refused"), 1)),
    ("warn", "no address", findings.ports(replace(PORTS, name_error="unknown"), 1)),
    ("ok", "127.0.1.1", findings.ports(replace(PORTS, address="127.0.1.1"), 1)),
    ("warn", "SPMD_RL_INTERFACE", findings.ports(replace(PORTS, address="127.0.1.1"), 2)),
    ("warn", "port 1024", findings.ports(replace(PORTS, first_ephemeral=1024), 1)),
    ("ok", "not in a Slurm job", findings.slurm({}, 0, 2)),
    ("ok", "job 7 on 2 nodes", findings.slurm(JOB, 0, 8)),
    ("ok", "job 7", findings.slurm(JOB | {"SLURM_GPUS_ON_NODE": "4"}, 4, 64)),
    (
        "fail",
        "SLURM_JOB_NODELIST",
        findings.slurm({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, 0, 8),
    ),
    ("fail", "8 tasks a node", findings.slurm(JOB | {"SLURM_NTASKS_PER_NODE": "8"}, 8, 64)),
    ("fail", "node 5 of 2", findings.slurm(JOB | {"SLURM_NODEID": "5"}, 0, 8)),
    ("fail", "CUDA_VISIBLE_DEVICES", findings.slurm(JOB | {"SLURM_GPUS_ON_NODE": "8"}, 4, 64)),
    ("warn", "1 CPUs for 8 ranks", findings.slurm(JOB, 8, 1)),
    ("ok", "can be graded", findings.sandbox("")),
    (
        "warn",
        "needs bwrap, which is missing: runs without",
        findings.sandbox("needs bwrap, which is missing"),
    ),
    ("ok", "500 GiB", findings.folder(FOLDER)),
    ("warn", "5 GiB", findings.folder(replace(FOLDER, free_bytes=5 * GIB))),
    ("fail", "read-only", findings.folder(replace(FOLDER, error="read-only file system"))),
    ("fail", "atomic rename", findings.folder(replace(FOLDER, renames=False))),
    ("fail", "file modes", findings.folder(replace(FOLDER, keeps_modes=False))),
]


@pytest.mark.parametrize(
    ("level", "says", "finding"), CASES, ids=[f"{case[2].name}-{case[1]}" for case in CASES]
)
def test_finding(level: str, says: str, finding: HostFinding) -> None:
    line = str(finding)
    assert line.startswith(f"{level:<4}  {finding.name}")
    assert says in line
    assert "\n" not in line
    assert bool(finding.fix) is (level != "ok")


def test_every_rule_can_fail_or_warn() -> None:
    unhappy = {finding.name for level, _, finding in CASES if level != "ok"}
    assert unhappy == {finding.name for _, _, finding in CASES}
