"""Findings: what the facts about a host mean for a run, and how to fix what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spmd_rl.check.facts import ClockSkew, Gpus, Network, RunsFolder, SystemLimits, TrialResult

Level = Literal["ok", "warn", "fail"]

GIB = 2**30
PYTHONS = ((3, 11), (3, 12))
TORCHES = ((2, 11), (2, 13))
NOFILE = 4096
JOB_PORTS = 30000  # ports below may be the rendezvous of a Slurm job


@dataclass(frozen=True)
class HostFinding:
    """One line of `spmd-rl check`. A `fix` belongs to every finding that is not ok."""

    level: Level
    name: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f": {self.fix}" if self.fix else ""
        return f"{self.level:<4}  {self.name:<9}  {self.what}{fix}"


def run(recipe: str) -> HostFinding:
    """Say that the input of a run was accepted; what is not accepted is an error."""
    return HostFinding("ok", "run", f"{recipe} accepts its settings, model, data, reward and hooks")


def python(version: tuple[int, int]) -> HostFinding:
    text = f"Python {version[0]}.{version[1]}"
    if PYTHONS[0] <= version <= PYTHONS[-1]:
        return HostFinding("ok", "python", text)
    return HostFinding("fail", "python", text, "use Python 3.11 or 3.12")


def torch(version: str | None) -> HostFinding:
    """Judge torch's version, as in 2.13.0+cpu; None if it is not installed."""
    install = "run pip install 'torch>=2.11,<2.14'"
    if version is None:
        return HostFinding("fail", "torch", "not installed", install)
    major, minor, *_ = version.split(".")
    if TORCHES[0] <= (int(major), int(minor)) <= TORCHES[-1]:
        return HostFinding("ok", "torch", f"torch {version}")
    return HostFinding("fail", "torch", f"torch {version}", install)


def driver(gpus: Gpus) -> HostFinding:
    """Judge the GPUs and their driver, and whether torch can use them."""
    if gpus.num_devices == 0 and not gpus.names:
        return HostFinding("ok", "gpus", "no GPU: runs will use CPUs")
    version = f"driver {gpus.driver or 'unknown'}"
    if gpus.names:
        return HostFinding(
            "ok", "gpus", f"{len(gpus.names)} x {gpus.names[0]}, {version}, CUDA {gpus.cuda}"
        )
    return _unusable_gpus(gpus, version)


def _unusable_gpus(gpus: Gpus, version: str) -> HostFinding:
    """Judge why torch can use none of the GPUs."""
    if gpus.hidden:
        fix = "unset it, unless runs should use CPUs"
        return HostFinding(
            "warn", "gpus", f"{gpus.num_devices} GPUs, all hidden by CUDA_VISIBLE_DEVICES", fix
        )
    if gpus.cuda is None:
        fix = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        return HostFinding(
            "fail", "gpus", f"{gpus.num_devices} GPUs, but this torch is built for CPUs", fix
        )
    fix = f"install a newer driver, or a torch for an older CUDA than {gpus.cuda} ({gpus.error})"
    return HostFinding(
        "fail", "gpus", f"{gpus.num_devices} GPUs with {version}, but torch cannot use them", fix
    )


def peers(gpus: Gpus) -> HostFinding:
    """Judge whether each GPU can access the memory of the others."""
    if len(gpus.names) < 2:
        return HostFinding("ok", "p2p", "not tried: fewer than two GPUs")
    if not gpus.no_peer_access:
        return HostFinding("ok", "p2p", f"peer access between every pair of {len(gpus.names)} GPUs")
    pairs = ", ".join(f"{a}-{b}" for a, b in gpus.no_peer_access[:4])
    if len(gpus.no_peer_access) > 4:
        pairs += ", ..."
    fix = (
        "see `nvidia-smi topo -p2p r`, and have ACS turned off in a virtual machine; "
        "until then weights go through host memory"
    )
    return HostFinding("warn", "p2p", f"no peer access between GPUs {pairs}", fix)


def nccl(trial: TrialResult | None) -> HostFinding:
    """Judge the trial of an NCCL all-reduce over two GPUs."""
    if trial is None:
        return HostFinding("ok", "nccl", "not tried: fewer than two GPUs")
    if trial.ok:
        return HostFinding("ok", "nccl", trial.output)
    fix = (
        "run with NCCL_DEBUG=INFO and check /dev/shm; "
        "if NCCL_P2P_DISABLE=1 helps, turn off ACS or the IOMMU"
    )
    return HostFinding("fail", "nccl", trial.output, fix)


def ipc(trial: TrialResult | None) -> HostFinding:
    """Judge the trial in which one process reads the GPU memory of another."""
    if trial is None:
        return HostFinding("ok", "ipc", "not tried: no GPU")
    if trial.ok:
        return HostFinding("ok", "ipc", trial.output)
    fix = (
        "start containers with --ipc=host and --pid=host, "
        "and run all ranks of a node in one container"
    )
    return HostFinding("fail", "ipc", trial.output, fix)


def files(limits: SystemLimits) -> HostFinding:
    """Judge the limit on open files.

    The controller has a socket for every rank, and gloo a connection for every pair of ranks.
    """
    what = f"limit of {limits.nofile} open files"
    if limits.nofile >= NOFILE:
        return HostFinding("ok", "nofile", what)
    level: Level = "fail" if limits.nofile < 1024 else "warn"
    return HostFinding(
        level, "nofile", what, "raise it with ulimit -Hn 65536, or LimitNOFILE in slurmd's service"
    )


def memlock(limits: SystemLimits) -> HostFinding:
    """Judge the limit on locked memory, which only InfiniBand needs."""
    if limits.memlock_bytes is None:
        return HostFinding("ok", "memlock", "unlimited locked memory")
    what = f"limit of {limits.memlock_bytes // 1024} KiB of locked memory"
    if not limits.num_infiniband:
        return HostFinding("ok", "memlock", f"{what}, enough without InfiniBand")
    fix = "raise it with ulimit -l unlimited, or LimitMEMLOCK=infinity in slurmd's service"
    return HostFinding(
        "fail", "memlock", f"{what}, too little for {limits.num_infiniband} InfiniBand devices", fix
    )


def shared_memory(limits: SystemLimits, num_gpus: int) -> HostFinding:
    """Judge the free space of /dev/shm, which NCCL and pinned weights use."""
    if limits.shm_bytes is None:
        return HostFinding(
            "fail", "shm", "there is no /dev/shm", "mount it; start containers with --shm-size=16g"
        )
    what = f"/dev/shm has {limits.shm_bytes / GIB:.1f} GiB free"
    if limits.shm_bytes >= GIB:
        return HostFinding("ok", "shm", what)
    level: Level = "fail" if num_gpus > 1 else "warn"
    return HostFinding(
        level,
        "shm",
        what,
        "remove files from it; start containers with --shm-size=16g or --ipc=host",
    )


def clock(skew: ClockSkew) -> HostFinding:
    """Judge how far the clocks differ."""
    what = f"clocks differ by {skew.seconds:.2f} s ({skew.against})"
    if skew.seconds < 1.0:
        return HostFinding("ok", "clock", what)
    level: Level = "warn" if skew.seconds < 60.0 else "fail"
    return HostFinding(
        level,
        "clock",
        what,
        "start chrony or systemd-timesyncd on every node (munge refuses large differences)",
    )


def ports(network: Network, num_nodes: int) -> HostFinding:
    """Judge whether sockets of this host can be reached, from here and from other nodes."""
    if network.loopback_error:
        return HostFinding(
            "fail",
            "ports",
            f"127.0.0.1 does not work: {network.loopback_error}",
            "run ip link set lo up",
        )
    if network.name_error:
        fix = f"add it to /etc/hosts or to DNS ({network.name_error})"
        return HostFinding("warn", "ports", f"this host's name {network.host} has no address", fix)
    if num_nodes > 1 and network.address.startswith("127."):
        fix = (
            "set SPMD_RL_INTERFACE, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "to an interface that they reach"
        )
        return HostFinding(
            "warn",
            "ports",
            f"{network.host} resolves to {network.address}, which other nodes cannot reach",
            fix,
        )
    if network.first_ephemeral < JOB_PORTS:
        fix = (
            "run sysctl net.ipv4.ip_local_port_range='32768 60999', "
            "or a client may take the rendezvous port of a Slurm job"
        )
        return HostFinding(
            "warn", "ports", f"ports of client sockets start at port {network.first_ephemeral}", fix
        )
    return HostFinding(
        "ok", "ports", f"loopback works, {network.host} resolves to {network.address}"
    )


def slurm(variables: Mapping[str, str], num_gpus: int, num_cpus: int) -> HostFinding:
    """Judge the variables of a Slurm job against what this process sees."""
    if "SLURM_JOB_ID" not in variables:
        return HostFinding("ok", "slurm", "not in a Slurm job")
    for problem in (_placement(variables), _resources(variables, num_gpus, num_cpus)):
        if problem is not None:
            return problem
    nodes = variables.get("SLURM_NNODES", "?")
    return HostFinding(
        "ok", "slurm", f"job {variables['SLURM_JOB_ID']} on {nodes} nodes, {num_cpus} CPUs here"
    )


def folder(runs: RunsFolder) -> HostFinding:
    """Judge the file system of the runs: checkpoints need atomic renames, the secret file modes."""
    if runs.error:
        return HostFinding(
            "fail",
            "runs",
            f"{runs.path} cannot be written ({runs.error})",
            "choose another folder with --run.folder=...",
        )
    if not runs.renames:
        fix = "a checkpoint could be lost there: choose a POSIX file system with --run.folder=..."
        return HostFinding("fail", "runs", f"{runs.path} has no atomic rename", fix)
    if not runs.keeps_modes:
        fix = (
            "others could read the secret of a run: "
            "choose another file system with --run.folder=..."
        )
        return HostFinding("fail", "runs", f"{runs.path} does not keep file modes", fix)
    what = f"{runs.path} is writable, {runs.free_bytes / GIB:.0f} GiB free"
    if runs.free_bytes < 10 * GIB:
        return HostFinding(
            "warn",
            "runs",
            what,
            "free more: a checkpoint of a 7B model with its optimizer takes about 90 GiB",
        )
    return HostFinding("ok", "runs", what)


def sandbox(problem: str) -> HostFinding:
    """Judge whether programs can be graded here, which few runs need."""
    if problem:
        return HostFinding(
            "warn", "sandbox", problem, "runs without reward = 'code' do not need it"
        )
    return HostFinding("ok", "sandbox", "programs of responses can be graded (reward = 'code')")


def _placement(variables: Mapping[str, str]) -> HostFinding | None:
    """Judge the job's nodes and tasks: the launch script needs one task a node."""
    missing = [name for name in ("SLURM_NNODES", "SLURM_JOB_NODELIST") if name not in variables]
    if missing:
        fix = "start in the job's own shell or with srun, so that all its variables are set"
        return HostFinding(
            "fail",
            "slurm",
            f"in job {variables['SLURM_JOB_ID']}, but {' and '.join(missing)} is not set",
            fix,
        )
    tasks = variables.get("SLURM_NTASKS_PER_NODE", "1")
    if tasks != "1":
        return HostFinding(
            "fail",
            "slurm",
            f"{tasks} tasks a node",
            "use --ntasks-per-node=1, since torchrun starts the ranks",
        )
    node = variables.get("SLURM_NODEID", "0")
    if int(node) >= int(variables["SLURM_NNODES"]):
        fix = "unset the SLURM_* variables of the outer job, or start with srun"
        return HostFinding("fail", "slurm", f"node {node} of {variables['SLURM_NNODES']}", fix)
    return None


def _resources(variables: Mapping[str, str], num_gpus: int, num_cpus: int) -> HostFinding | None:
    """Judge the job's GPUs and CPUs against those that this process sees."""
    given = variables.get("SLURM_GPUS_ON_NODE")
    if given is not None and int(given) != num_gpus:
        fix = (
            "check CUDA_VISIBLE_DEVICES and the --gpus* options, "
            "since every rank needs a GPU that it sees"
        )
        return HostFinding(
            "fail",
            "slurm",
            f"the job has {given} GPUs on this node, but torch sees {num_gpus}",
            fix,
        )
    num_ranks = max(num_gpus, 1)
    if num_cpus < 2 * num_ranks:
        fix = "use --exclusive or --cpus-per-task=N, since each rank needs two or more"
        return HostFinding("warn", "slurm", f"{num_cpus} CPUs for {num_ranks} ranks", fix)
    return None
