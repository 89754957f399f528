"""Facts about this host that `spmd-rl check` judges. Those about GPUs are collected elsewhere."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from spmd_rl.errors import ConfigError
from spmd_rl.rewards.code.sandbox import check_sandbox
from spmd_rl.rewards.config import CodeConfig

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
DRIVER = Path("/proc/driver/nvidia/version")
INFINIBAND = Path("/sys/class/infiniband")
LOOPBACK_S = 5.0


@dataclass(frozen=True)
class Gpus:
    """GPUs of this host: `num_devices` that the kernel shows, `names` of those that torch can use.

    `no_peer_access` lists the pairs of GPUs that cannot read each other's memory.
    """

    num_devices: int
    driver: str
    cuda: str | None  # the version that torch was built for; None without CUDA
    names: tuple[str, ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()
    error: str = ""
    hidden: bool = False  # whether CUDA_VISIBLE_DEVICES hides all of them


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial in a child process, with its last line of output."""

    ok: bool
    output: str


@dataclass(frozen=True)
class SystemLimits:
    """Limits of this process and host that a run may hit."""

    nofile: int
    memlock_bytes: int | None  # None if unlimited
    shm_bytes: int | None  # free in /dev/shm; None if there is no /dev/shm
    num_infiniband: int


@dataclass(frozen=True)
class Network:
    """Name and address of this host, and whether its loopback works."""

    host: str
    address: str
    first_ephemeral: int  # the first port that clients get
    loopback_error: str = ""
    name_error: str = ""


@dataclass(frozen=True)
class RunsFolder:
    """What the file system of the runs' folder can do."""

    path: Path
    free_bytes: int = 0
    renames: bool = False
    keeps_modes: bool = False
    error: str = ""


@dataclass(frozen=True)
class ClockSkew:
    """How far two clocks differ, and which."""

    seconds: float
    against: str


def torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def nvidia_devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def nvidia_driver() -> str:
    """Return the version of NVIDIA's driver, or ""."""
    if not DRIVER.exists():
        return ""
    words = DRIVER.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def system_limits() -> SystemLimits:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = Path("/dev/shm")
    return SystemLimits(
        nofile=_finite(
            resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        ),  # ranks raise it to the hard limit
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        num_infiniband=len(list(INFINIBAND.iterdir())) if INFINIBAND.is_dir() else 0,
    )


def network() -> Network:
    host = socket.gethostname()
    first = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    try:
        address, name_error = socket.gethostbyname(host), ""
    except OSError as error:
        address, name_error = "", str(error)
    return Network(host, address, first, _loopback_error(), name_error)


def runs_folder(path: Path) -> RunsFolder:
    """Try what a run does in its folder, in the nearest existing parent, and leave no file."""
    existing = _nearest_folder(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".spmd_rl-check-", dir=existing) as scratch:
            return RunsFolder(
                existing,
                shutil.disk_usage(existing).free,
                _renames(Path(scratch)),
                _keeps_modes(Path(scratch)),
            )
    except OSError as error:
        return RunsFolder(existing, error=error.strerror or str(error))


def sandbox_problem() -> str:
    """Return why programs cannot be graded in a sandbox here, or "" where they can."""
    try:
        check_sandbox(CodeConfig())
    except ConfigError as error:
        return str(error)
    return ""


def _nearest_folder(path: Path) -> Path:
    """Return `path` if it is a folder, else its nearest parent that is one."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def file_skew(path: Path) -> ClockSkew:
    """Compare this host's clock with that of the file system that holds `path`.

    On a shared file system, all nodes compare with the same clock.
    """
    existing = _nearest_folder(path)
    try:
        with tempfile.NamedTemporaryFile(prefix=".spmd_rl-check-", dir=existing) as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            after = time.time()
            written = os.stat(file.name).st_mtime
    except OSError as error:
        return ClockSkew(0.0, f"no other clock: {existing} cannot be written ({error.strerror})")
    return ClockSkew(
        max(before - written, written - after, 0.0), f"this host to the file system of {existing}"
    )


def _loopback_error() -> str:
    """Return why a connection to 127.0.0.1 fails, or ""."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), LOOPBACK_S),
        ):
            return ""
    except OSError as error:
        return str(error)


def _renames(scratch: Path) -> bool:
    """Whether a rename replaces a file atomically and moves a folder."""
    old, new, part = scratch / "file", scratch / "file.part", scratch / "folder.part"
    old.write_text("old")
    new.write_text("new")
    part.mkdir()
    (part / "inside").write_text("x")
    os.replace(new, old)
    os.rename(part, scratch / "folder")
    return (
        old.read_text() == "new" and not new.exists() and (scratch / "folder" / "inside").exists()
    )


def _keeps_modes(scratch: Path) -> bool:
    path = scratch / "secret"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path.stat().st_mode & 0o777 == 0o600


def _finite(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit
