"""Real Slurm on this host: munged, slurmctld and a slurmd for each node, as children of the test.

Everything runs as the user of the tests, on ports that were free. Cgroups are not used, so that it
runs in a container without them. All of it ends with the test.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NODE_MARK = "SPMD_RL_TEST_NODE"
START_S = 300.0
POLL_S = 0.1

CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=10
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2\n"


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def until(condition: Callable[[], T], what: str, within_s: float = 600.0) -> T:
    """Return the first true value of `condition`. Blocks: for `within_s` at most, then fails."""
    give_up_at = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < give_up_at, f"not within {within_s:g} s: {what}"
        threading.Event().wait(POLL_S)
    return value


class Cluster:
    """A cluster; `environment` is what a client of it needs."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.nodes = nodes
        # the path of a socket must be short
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o711)  # munged requires that all users can reach its socket
        conf = self.folder / "slurm.conf"
        base = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "SBATCH", "SPMD_RL", "TORCHELASTIC"))
        }
        self.environment = base | {"SLURM_CONF": str(conf), "PATH": PATH}
        ctld_port, *node_ports = _free_ports(1 + len(nodes))
        text = CONF.format(folder=self.folder, user=getpass.getuser(), ctld_port=ctld_port)
        lines = [
            NODE.format(name=name, port=port) for name, port in zip(nodes, node_ports, strict=True)
        ]
        conf.write_text("".join(lines) + text)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Wait until every node is idle. Blocks: for `START_S` at most, then fails."""
        self._start_munged()
        (self.folder / "state").mkdir()
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for node in self.nodes:
            self.start_node(node)
        until(self._all_idle, f"every node idle (see {self.folder})", START_S)

    def start_node(self, node: str) -> None:
        (self.folder / node).mkdir(exist_ok=True)
        self._start(node, ["slurmd", "-D", "-N", node], **{NODE_MARK: node})

    def kill_node(self, node: str) -> None:
        """Cut a node's power: kill its daemon and all that runs there, and tell Slurm."""
        daemon = self._daemons.pop(node)
        for pid in [
            daemon.pid,
            *self.processes(f"{NODE_MARK}={node}"),
            *self.processes(f"SLURMD_NODENAME={node}"),
        ]:
            _kill(pid)
        daemon.wait()
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost power")

    def revive_node(self, node: str) -> None:
        self.start_node(node)
        until(self._all_idle, f"{node} idle again", START_S)

    def stop(self) -> None:
        """Kill every process of this cluster, and remove its folder."""
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.processes():
            _kill(pid)
        shutil.rmtree(self.folder)

    def command(self, *words: str, **environment: str) -> str:
        """Return the output of a Slurm client; fail when the client does."""
        variables = self.environment | environment
        done = subprocess.run(
            words, env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """Return what Slurm knows of a job, such as JobState and Restarts."""
        words = self.command("scontrol", "show", "job", "--oneliner", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def processes(self, *variables: str) -> list[int]:
        """Return this cluster's processes, without daemons, whose environment has these entries.

        An entry is `NAME=value`, or `NAME=` for any value.
        """
        wanted = [
            f"SLURM_CONF={self.environment['SLURM_CONF']}".encode(),
            *(one.encode() for one in variables),
        ]
        daemons = {daemon.pid for daemon in self._daemons.values()}
        return [
            pid
            for pid, held in _environments()
            if pid not in daemons and all(_holds(held, one) for one in wanted)
        ]

    def busy(self) -> bool:
        """Return whether any process of a job still runs."""
        return bool(self.processes(f"{NODE_MARK}=") or self.processes("SLURM_JOB_ID="))

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        own = {
            "socket": "sock",
            "key-file": "key",
            "log-file": "log",
            "pid-file": "pid",
            "seed-file": "seed",
        }
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in own.items()]
        self._start("munged", ["munged", "--foreground", "--num-threads=4", *options])
        until(
            (self.folder / "munge.sock").exists,
            f"munged's socket (see {self.folder}/munged.out)",
            START_S,
        )

    def _start(self, name: str, command: list[str], **environment: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _all_idle(self) -> bool:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, (
                f"{name} ended: {(self.folder / f'{name}.out').read_text()}"
            )
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%t"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return done.stdout.split() == ["idle"] * len(self.nodes)


def _free_ports(num: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """Return every process whose environment this user may read."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or belongs to another user
                continue


def _holds(environment: list[bytes], wanted: bytes) -> bool:
    return any(
        item == wanted or (wanted.endswith(b"=") and item.startswith(wanted))
        for item in environment
    )


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
