"""Hooks that leave something behind in their process, and one that looks at what it finds there."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import zlib
from typing import Any

import numpy as np

from spmd_rl.hooks.context import HookContext
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

HOME = os.getcwd()
KEPT: list[Any] = []  # what calls have opened


def lower(limit: int, hard: bool = False) -> None:
    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (1 << 20, 1 << 20 if hard else most))


def open_many() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    KEPT.extend(os.open("/", os.O_RDONLY) for _ in range(soft // 2 + 10))


LEAVES = {
    "processor time": lambda: lower(resource.RLIMIT_CPU),
    "stack": lambda: lower(resource.RLIMIT_STACK),
    "a hard limit": lambda: lower(resource.RLIMIT_CORE, hard=True),
    "folder": lambda: os.chdir("/"),
    "umask": lambda: os.umask(0o777),
    "variable": lambda: os.environ.update(PATH="/nowhere", LEFT="1"),
    "no variable": lambda: os.environ.pop("PATH"),
    "handler": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]),
    "timer": lambda: signal.setitimer(signal.ITIMER_PROF, 100.0),
    "path": lambda: sys.path.insert(0, "/nowhere"),
    "recursion": lambda: sys.setrecursionlimit(200),
    "collector": gc.disable,
    "trace": lambda: sys.setprofile(lambda *_: None),
    "output": lambda: os.dup2(os.open("/dev/null", os.O_WRONLY), 1),
    "files": open_many,
    "threads": lambda: [threading.Thread(target=signal.pause).start() for _ in range(300)],
}


def leaves(prompt: Prompt, sample: Sample) -> float:
    """Leave what the sample's text says; else return a number for what is found."""
    if sample.text in LEAVES:
        LEAVES[sample.text]()
        return 0.0
    return found()


async def async_leaves(prompt: Prompt, sample: Sample) -> float:
    return leaves(prompt, sample)


def found() -> float:
    limits = sorted(
        (name, resource.getrlimit(getattr(resource, name)))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    )
    umask = os.umask(0o22)
    os.umask(umask)
    variables = sorted((name, value) for name, value in os.environ.items() if "SPMD" not in name)
    timers = [signal.getitimer(one)[0] for one in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL)]
    state = (
        *(limits, umask, variables, timers, os.getcwd(), sys.path, sys.getrecursionlimit()),
        *(signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        *(gc.isenabled(), sys.getprofile(), os.fstat(1).st_ino == os.fstat(2).st_ino),
        *(threading.active_count() < 100, len(os.listdir("/proc/self/fd")) < 100),
    )
    return float(zlib.crc32(repr(state).encode()))


def leaves_folder(ctx: HookContext, prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Leave the folder if the text says so; an earlier call must not have done it."""
    KEPT.append(None)
    ctx.emit(str(len(KEPT)), 1.0)
    ctx.note("said", str(len(KEPT)))
    at_home = os.getcwd() == HOME
    if sample.text == "leave":
        os.chdir("/")
    return {"reward": at_home, "calls": len(KEPT)}


def seeds(prompt: Prompt, sample: Sample) -> float:
    """Seed the shared random numbers, or draw from them."""
    if sample.text == "seed":
        random.seed(1)
        np.random.seed(1)
    return random.random() + np.random.random()


def starts(prompt: Prompt, sample: Sample) -> float:
    """Start a process in a session of its own, and return its pid."""
    if sample.text == "orphan":  # whose parent ends at once, and that has no environment
        program = (
            "import subprocess as s; "
            "print(s.Popen(['/bin/sleep', '1000'], env={}, stdout=s.DEVNULL).pid)"
        )
        line = subprocess.run(
            [sys.executable, "-c", program],
            start_new_session=True,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"]},
            check=True,
        ).stdout
        return float(line)
    if sample.text == "sleeps":
        return float(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(sample.text, "w") as file:
        file.write(str(child.pid))
    os._exit(3)
