"""What the facts of a host mean for a run: one finding each, with the fix where something is wrong.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spmd_rl.check.facts import ClockSkew, Folder, Gpus, Limits, Ports, Probe

GIB = 2**30
PYTHONS = ((3, 11), (3, 12))
TORCHES = ((2, 11), (2, 13))
NOFILE = 4096
JOB_PORTS = 30000  # a Slurm job's rendezvous port lies below


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    name: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.name:<9}  {self.what}" + (
            f": {self.fix}" if self.fix else ""
        )


def python(version: tuple[int, int]) -> Finding:
    text = f"Python {version[0]}.{version[1]}"
    if PYTHONS[0] <= version <= PYTHONS[-1]:
        return Finding("ok", "python", text)
    return Finding("fail", "python", text, "make the environment with Python 3.11 or 3.12")


def torch(version: str | None) -> Finding:
    """`version` as its package says it, such as 2.13.0+cpu."""
    install = "pip install 'torch>=2.11,<2.14'"
    if version is None:
        return Finding("fail", "torch", "not installed", install)
    major, minor, *_ = version.split(".")
    if TORCHES[0] <= (int(major), int(minor)) <= TORCHES[-1]:
        return Finding("ok", "torch", f"torch {version}")
    return Finding("fail", "torch", f"torch {version}", install)


def driver(gpus: Gpus) -> Finding:
    """The NVIDIA driver, and whether this torch can use it."""
    if gpus.num_devices == 0 and not gpus.names:
        return Finding("ok", "gpus", "none: the run will use CPUs")
    seen = f"driver {gpus.driver or 'unknown'}"
    if gpus.names:
        return Finding(
            "ok", "gpus", f"{len(gpus.names)} x {gpus.names[0]}, {seen}, CUDA {gpus.cuda}"
        )
    if gpus.hidden:
        fix = "unset it unless the run is to use CPUs"
        return Finding(
            "warn", "gpus", f"{gpus.num_devices} GPUs, all hidden by CUDA_VISIBLE_DEVICES", fix
        )
    if gpus.cuda is None:
        fix = "install torch from its CUDA index (https://pytorch.org/get-started/locally)"
        return Finding(
            "fail", "gpus", f"{gpus.num_devices} GPUs, but this torch is built for CPUs", fix
        )
    fix = f"a newer driver, or a torch built for an older CUDA than {gpus.cuda} ({gpus.error})"
    return Finding(
        "fail", "gpus", f"{gpus.num_devices} GPUs with {seen}, but torch cannot use them", fix
    )


def peers(gpus: Gpus) -> Finding:
    """Whether each GPU reaches each other's memory."""
    if len(gpus.names) < 2:
        return Finding("ok", "p2p", "fewer than two GPUs")
    if not gpus.strangers:
        return Finding("ok", "p2p", f"every pair of {len(gpus.names)} GPUs")
    pairs = ", ".join(f"{a}-{b}" for a, b in gpus.strangers[:4]) + (
        ", ..." if len(gpus.strangers) > 4 else ""
    )
    fix = "see `nvidia-smi topo -p2p r`; in a virtual machine ask for ACS to be off; weights then go through the host"
    return Finding("warn", "p2p", f"no peer access between GPUs {pairs}", fix)


def nccl(probe: Probe | None) -> Finding:
    """A sum over two GPUs by NCCL."""
    if probe is None:
        return Finding("ok", "nccl", "fewer than two GPUs")
    if probe.ok:
        return Finding("ok", "nccl", probe.said)
    fix = "run with NCCL_DEBUG=INFO; if NCCL_P2P_DISABLE=1 helps, turn off ACS or the IOMMU; check /dev/shm"
    return Finding("fail", "nccl", probe.said, fix)


def ipc(probe: Probe | None) -> Finding:
    """One process reading another's GPU memory through a handle."""
    if probe is None:
        return Finding("ok", "ipc", "no GPU")
    if probe.ok:
        return Finding("ok", "ipc", probe.said)
    fix = "in a container --ipc=host and --pid=host, and one container for all ranks of a node"
    return Finding("fail", "ipc", probe.said, fix)


def files(limits: Limits) -> Finding:
    """Open files: a socket for every rank at the controller, a connection for every pair of ranks
    in gloo.
    """
    what = f"{limits.nofile} open files at most"
    if limits.nofile >= NOFILE:
        return Finding("ok", "nofile", what)
    level: Literal["warn", "fail"] = "fail" if limits.nofile < 1024 else "warn"
    return Finding(level, "nofile", what, "ulimit -Hn 65536, or LimitNOFILE in slurmd's service")


def memlock(limits: Limits) -> Finding:
    """Locked memory, which only InfiniBand's registration needs."""
    if limits.memlock_bytes is None:
        return Finding("ok", "memlock", "unlimited")
    what = f"{limits.memlock_bytes // 1024} KiB of locked memory"
    if not limits.num_infiniband:
        return Finding("ok", "memlock", f"{what}, and no InfiniBand that needs more")
    fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity in slurmd's service"
    return Finding(
        "fail", "memlock", f"{what}, too little for {limits.num_infiniband} InfiniBand devices", fix
    )


def shared_memory(limits: Limits, num_gpus: int) -> Finding:
    """/dev/shm, where NCCL and pinned weights live."""
    if limits.shm_bytes is None:
        return Finding(
            "fail", "shm", "there is no /dev/shm", "mount one: in a container --shm-size=16g"
        )
    what = f"/dev/shm has {limits.shm_bytes / GIB:.1f} GiB free"
    if limits.shm_bytes >= GIB:
        return Finding("ok", "shm", what)
    level: Literal["warn", "fail"] = "fail" if num_gpus > 1 else "warn"
    return Finding(
        level, "shm", what, "in a container --shm-size=16g or --ipc=host; else remove what fills it"
    )


def clock(skew: ClockSkew) -> Finding:
    """How far the clocks are apart."""
    what = f"{skew.seconds:.2f} s from {skew.against}"
    if skew.seconds < 1.0:
        return Finding("ok", "clock", what)
    level: Literal["warn", "fail"] = "warn" if skew.seconds < 60.0 else "fail"
    return Finding(
        level,
        "clock",
        what,
        "start chrony or systemd-timesyncd on every node; munge refuses minutes",
    )


def ports(found: Ports, num_nodes: int) -> Finding:
    """Whether a socket can be opened here, and reached from here and from the other nodes."""
    if found.loopback_error:
        return Finding(
            "fail", "ports", f"127.0.0.1 does not work: {found.loopback_error}", "ip link set lo up"
        )
    if found.name_error:
        fix = f"give it one in /etc/hosts or in DNS ({found.name_error})"
        return Finding("warn", "ports", f"this host's name {found.host} has no address", fix)
    if num_nodes > 1 and found.address.startswith("127."):
        fix = "name an interface that they can, in SPMD_RL_INTERFACE, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return Finding(
            "warn", "ports", f"{found.host} is {found.address}, which other nodes cannot reach", fix
        )
    if found.first_ephemeral < JOB_PORTS:
        fix = "sysctl net.ipv4.ip_local_port_range='32768 60999', or a client may take the port of a job's rendezvous"
        return Finding(
            "warn", "ports", f"client sockets begin at port {found.first_ephemeral}", fix
        )
    return Finding("ok", "ports", f"loopback works, {found.host} is {found.address}")


def slurm(variables: Mapping[str, str], num_gpus: int, num_cpus: int) -> Finding:
    """The variables of a Slurm job against what this process sees."""
    if "SLURM_JOB_ID" not in variables:
        return Finding("ok", "slurm", "not in a job")
    for problem in (_placement(variables), _resources(variables, num_gpus, num_cpus)):
        if problem is not None:
            return problem
    nodes = variables.get("SLURM_NNODES", "?")
    return Finding(
        "ok", "slurm", f"job {variables['SLURM_JOB_ID']} on {nodes} nodes, {num_cpus} CPUs here"
    )


def folder(found: Folder) -> Finding:
    """The place of the run's folder: checkpoints need renames that are whole, the secret needs file
    modes.
    """
    if found.error:
        return Finding(
            "fail",
            "runs",
            f"{found.path} cannot be written ({found.error})",
            "set --run.folder=...",
        )
    if not found.renames:
        fix = "choose a POSIX file system with --run.folder=...; a checkpoint could be lost here"
        return Finding("fail", "runs", f"{found.path} has no atomic rename", fix)
    if not found.keeps_modes:
        fix = "choose another file system with --run.folder=...; a run's secret must not be open to others"
        return Finding("fail", "runs", f"{found.path} does not keep file modes", fix)
    what = f"{found.path} is writable, {found.free_bytes / GIB:.0f} GiB free"
    if found.free_bytes < 10 * GIB:
        return Finding(
            "warn", "runs", what, "a checkpoint of a 7B model and its optimizer takes about 90 GiB"
        )
    return Finding("ok", "runs", what)


def _placement(variables: Mapping[str, str]) -> Finding | None:
    """Nodes and tasks as the launch script expects them."""
    missing = [name for name in ("SLURM_NNODES", "SLURM_JOB_NODELIST") if name not in variables]
    if missing:
        fix = "start from the job's own shell or srun, not from a shell that kept only some of its variables"
        return Finding(
            "fail",
            "slurm",
            f"in job {variables['SLURM_JOB_ID']}, but no {' or '.join(missing)}",
            fix,
        )
    tasks = variables.get("SLURM_NTASKS_PER_NODE", "1")
    if tasks != "1":
        return Finding(
            "fail",
            "slurm",
            f"{tasks} tasks a node",
            "--ntasks-per-node=1: torchrun starts the ranks",
        )
    node = variables.get("SLURM_NODEID", "0")
    if int(node) >= int(variables["SLURM_NNODES"]):
        fix = "unset the SLURM_* variables of the outer job, or start with srun"
        return Finding("fail", "slurm", f"node {node} of {variables['SLURM_NNODES']}", fix)
    return None


def _resources(variables: Mapping[str, str], num_gpus: int, num_cpus: int) -> Finding | None:
    """GPUs and CPUs of the job against those that this process may use."""
    given = variables.get("SLURM_GPUS_ON_NODE")
    if given is not None and int(given) != num_gpus:
        fix = "look at CUDA_VISIBLE_DEVICES and at the --gpus* options: every rank needs one GPU that it sees"
        return Finding(
            "fail", "slurm", f"the job has {given} GPUs on this node, torch sees {num_gpus}", fix
        )
    if num_cpus < max(num_gpus, 1) * 2:
        fix = "--exclusive or --cpus-per-task=N: a rank needs two at least"
        return Finding("warn", "slurm", f"{num_cpus} CPUs for {max(num_gpus, 1)} ranks", fix)
    return None
