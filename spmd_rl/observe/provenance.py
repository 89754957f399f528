"""Provenance of a run, beside its config: command, commit, host, machine and versions."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PROVENANCE_FILE = "run.json"  # in the run's folder; each start replaces it
START_TIME_ENV = "SPMD_RL_BEGAN"  # unix time at which the launcher started
GIT_S = 5.0

_CPUS, _MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_GPUS = Path("/proc/driver/nvidia/gpus")


def record_start_time() -> None:
    """Tell all child processes that the run starts now."""
    os.environ[START_TIME_ENV] = str(time.time())


def start_unix_s() -> float:
    """Return when the launcher of this process started; now, if it did not say."""
    return float(os.environ.get(START_TIME_ENV) or time.time())


def provenance(words: Sequence[str], began_s: float) -> dict[str, Any]:
    """Return the facts of this start as plain data, without those that are unknown.

    `words` are the arguments after `spmd-rl run`; `began_s` is the unix time of the start.
    """
    source = Path(__file__).parents[2]
    facts = {
        "command": shlex.join(["spmd-rl", "run", *words]) if words else "",
        "folder": os.getcwd(),
        "commit": commit_of(Path.cwd()),
        "spmd_rl": _version("spmd-rl"),
        "spmd_rl_commit": commit_of(source) if (source / ".git").exists() else "",
        "torch": _version("torch"),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "machine": machine(),
        "began_unix_s": round(began_s, 3),
    }
    return {name: value for name, value in facts.items() if value}


def commit_of(folder: Path) -> str:
    """Return the commit of the git repository around `folder`, or "" without one.

    It ends in `-dirty` if a tracked file was changed.

    Blocks: until git answers, at most `GIT_S`.
    """
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # reading needs no lock
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=True,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def machine() -> str:
    """Return this host's hardware, as in `AMD EPYC 9R14, 16 cores, 124 GiB, 2 x NVIDIA H200`."""
    cores = num_processors()
    cpu = _field(_CPUS, "model name") or platform.processor() or platform.machine()
    memory = _field(_MEMORY, "MemTotal").partition(" ")[0]
    parts = [cpu, f"{cores} cores" if cores != 1 else "1 core"]
    parts += [f"{int(memory) / 2**20:.0f} GiB"] if memory.isdecimal() else []
    return ", ".join(parts + _gpu_models())


def num_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu_models() -> list[str]:
    """Return this host's models of GPU, each with its count, as in `2 x NVIDIA H200`."""
    models = [_field(path, "Model") for path in sorted(_GPUS.glob("*/information"))]
    return [f"{models.count(model)} x {model}" for model in dict.fromkeys(models)]


def _field(path: Path, name: str) -> str:
    """Return the first value called `name` in a file of /proc, or ""."""
    try:
        found = re.search(
            rf"^{name}\s*:\s*(.*?)\s*$", path.read_text(errors="replace"), re.MULTILINE
        )
    except OSError:
        return ""
    return found[1] if found else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
