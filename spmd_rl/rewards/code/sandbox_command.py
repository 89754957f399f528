"""Command line of bubblewrap for one program: what it sees of this host, and what it is kept from.

Nothing of /etc, /home, /sys or /var is visible. The folders of the system and of Python can only be
read. /tmp and /dev/shm are small, private and gone with the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from spmd_rl.rewards.config import CodeConfig

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # sets have the same order each time
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
FOLDER = "/sandbox"  # where the program's files are
NOBODY = 65534
# It has bubblewrap's own user, as root too, so that Linux lets the one end with the other. With it
# all other processes of its namespace end.
FIRST_PROCESS = '"$@"; exit $?'
FIRST_UNUSED_USER = 1_500_000_000  # above those that systems give out


def program_command(cfg: CodeConfig) -> tuple[str, ...]:
    """Return what runs a program, without the program's path."""
    first, *others = cfg.command or (sys.executable,)
    return (_real(first) if os.sep in first else first, *others)


def _real(path: str) -> str:
    """Return an absolute path to the same name, without links and ".." on the way to it.

    The sandbox has other folders around it. The name itself may be a link, as that of a Python in
    a virtual environment is, which looks for its settings beside the link.
    """
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def namespaces(is_root: bool) -> list[str]:
    """Return the options that keep a program apart from this host's processes and networks."""
    shared = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    own_user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [*shared, "--unshare-cgroup-try", *([] if is_root else own_user)]


def sandbox_command(
    cfg: CodeConfig,
    command: Sequence[str],
    *,
    files: Mapping[str, int],
    status: int,
    gate: int,
    calls: int | None,
    is_root: bool,
) -> list[str]:
    """Return bubblewrap's command line around `command`.

    `files` has a descriptor for each file in `FOLDER`. bubblewrap tells the id of its first process
    through the descriptor `status`, and waits for a byte from `gate` before it runs the command.
    `calls` has the filter of system calls, where there is one for this machine.
    Root's programs get a user id that nobody has, because limits do not hold for root itself.
    """
    words = ["bwrap", *namespaces(is_root), "--as-pid-1", "--die-with-parent", "--new-session"]
    words += ["--clearenv"]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    words += [*_system(), "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(cfg.memory_mb << 20), "--tmpfs", folder]
    words += _bound([*_python_folders(cfg), *map(os.path.abspath, cfg.read_only)])
    words += _new_folder(FOLDER)
    for name, descriptor in files.items():
        words += ["--perms", "0444", "--ro-bind-data", str(descriptor), f"{FOLDER}/{name}"]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    words += ["--json-status-fd", str(status), "--block-fd", str(gate), "--cap-drop", "ALL"]
    if calls is not None:
        words += ["--seccomp", str(calls)]
    if is_root:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        user = str(FIRST_UNUSED_USER + os.getpid())
        command = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--", *command]
    return [*words, "/bin/sh", "-c", FIRST_PROCESS, "sh", *command]


def _system() -> Iterator[str]:
    for folder in SYSTEM:
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            yield from ("--ro-bind", folder, folder)


def _python_folders(cfg: CodeConfig) -> list[str]:
    """Return where this run's Python is, if it runs the programs."""
    if cfg.command:
        return []
    plain = [os.path.abspath(folder) for folder in (sys.prefix, sys.base_prefix)]
    return list(dict.fromkeys([*plain, *map(os.path.realpath, plain)]))


def _bound(folders: Sequence[str]) -> Iterator[str]:
    """Yield the options that show folders; those of the system are there already."""
    outside = {folder for folder in folders if Path(folder).parts[:2][-1] not in _SYSTEM_NAMES}
    for folder in sorted(outside):
        yield from _new_folder(str(Path(folder).parent))
        yield from ("--ro-bind", folder, folder)


_SYSTEM_NAMES = {folder.strip("/") for folder in SYSTEM}


def _new_folder(path: str) -> Iterator[str]:
    """Yield the options that make a folder and those above it, which every user may enter."""
    for folder in [*reversed(Path(path).parents), Path(path)]:
        if folder != Path("/"):
            yield from ("--perms", "0755", "--dir", str(folder))
