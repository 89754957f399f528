"""The facts of this host that need no torch, and the shapes of those that do."""

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

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
DRIVER = Path("/proc/driver/nvidia/version")
INFINIBAND = Path("/sys/class/infiniband")
LOOPBACK_S = 5.0


@dataclass(frozen=True)
class Gpus:
    """`num_devices` that the kernel shows, `names` of those that torch can use, `strangers`: pairs
    without access.
    """

    num_devices: int
    driver: str
    cuda: str | None  # that torch was built for
    names: tuple[str, ...] = ()
    strangers: tuple[tuple[int, int], ...] = ()
    error: str = ""
    hidden: bool = False  # by CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class Probe:
    """How a trial in a process of its own went."""

    ok: bool
    said: str


@dataclass(frozen=True)
class Limits:
    nofile: int
    memlock_bytes: int | None  # None: unlimited
    shm_bytes: int | None  # free; None: there is none
    num_infiniband: int


@dataclass(frozen=True)
class Ports:
    host: str
    address: str
    first_ephemeral: int
    loopback_error: str = ""
    name_error: str = ""


@dataclass(frozen=True)
class Folder:
    path: Path
    free_bytes: int = 0
    renames: bool = False
    keeps_modes: bool = False
    error: str = ""


@dataclass(frozen=True)
class ClockSkew:
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
    """Its version, or nothing where the kernel does not tell."""
    if not DRIVER.exists():
        return ""
    words = DRIVER.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def limits() -> Limits:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = Path("/dev/shm")
    return Limits(
        nofile=_or_many(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),  # a rank asks for them
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        num_infiniband=len(list(INFINIBAND.iterdir())) if INFINIBAND.is_dir() else 0,
    )


def ports() -> Ports:
    host = socket.gethostname()
    first = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    try:
        address, name_error = socket.gethostbyname(host), ""
    except OSError as error:
        address, name_error = "", str(error)
    return Ports(host, address, first, _loopback_error(), name_error)


def folder(path: Path) -> Folder:
    """Try out what a run does to its folder, in the nearest folder that exists, and leave nothing."""
    place = next(
        parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir()
    )
    try:
        with tempfile.TemporaryDirectory(prefix=".spmd_rl-check-", dir=place) as inside:
            return Folder(
                place,
                shutil.disk_usage(place).free,
                _renames(Path(inside)),
                _keeps_modes(Path(inside)),
            )
    except OSError as error:
        return Folder(place, error=error.strerror or str(error))


def file_skew(path: Path) -> ClockSkew:
    """This clock against that of the file system that holds `path`: on a shared one, all nodes
    compare with one.
    """
    place = next(
        parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir()
    )
    try:
        with tempfile.NamedTemporaryFile(prefix=".spmd_rl-check-", dir=place) as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            after = time.time()
            written = os.stat(file.name).st_mtime
    except OSError as error:
        return ClockSkew(0.0, f"nothing: {place} takes no file ({error.strerror})")
    return ClockSkew(max(before - written, written - after, 0.0), f"the file system of {place}")


def _loopback_error() -> str:
    """Why a connection to this host by 127.0.0.1 fails, or nothing."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), LOOPBACK_S),
        ):
            return ""
    except OSError as error:
        return str(error)


def _renames(inside: Path) -> bool:
    """Whether a rename replaces a file whole, and moves a folder."""
    old, new, part = inside / "file", inside / "file.part", inside / "folder.part"
    old.write_text("old")
    new.write_text("new")
    part.mkdir()
    (part / "inside").write_text("x")
    os.replace(new, old)
    os.rename(part, inside / "folder")
    return old.read_text() == "new" and not new.exists() and (inside / "folder" / "inside").exists()


def _keeps_modes(inside: Path) -> bool:
    path = inside / "secret"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path.stat().st_mode & 0o777 == 0o600


def _or_many(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit
