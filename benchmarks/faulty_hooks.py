"""Hooks with a fault: the meta of a prompt names it, and where it happens.

Each call is also counted in a file, so that a call that is made twice is seen. Functions that work
check that the folder, the output and the limits are as they were at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.transcript import Transcript
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

PLAIN, ASYNC, EPISODE = "plain", "async", "episode"  # where a fault may happen
_FOLDER = Path.cwd()


class Odd(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def raises(error: BaseException | type[BaseException]) -> Callable[[], NoReturn]:
    def fault() -> NoReturn:
        raise error

    return fault


def hang() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1e6)


def lock() -> None:
    own = threading.Lock()
    own.acquire()
    own.acquire()


def backtrack() -> None:
    re.match(r"(a|a)*b", "a" * 60)


def segfault() -> None:
    ctypes.string_at(0)


def recurse() -> None:
    recurse()


def overflow_stack() -> None:
    """Recursion in C that no limit of Python stops."""

    class Endless:
        def __repr__(self) -> str:
            return repr(self)

    sys.setrecursionlimit(1 << 30)
    repr(Endless())


def fork() -> None:
    os.fork()


def fork_many() -> None:
    for _ in range(6):
        if os.fork() == 0:
            time.sleep(1e6)


def fork_and_exit() -> None:
    if os.fork() == 0:
        time.sleep(1e6)
    os._exit(0)


def print_for_ever() -> None:
    while True:
        print("x" * 1000)


def write_for_ever() -> None:
    data = bytes(1 << 16)
    while True:
        os.write(1, data)
        os.write(2, data)


def write_everywhere() -> None:
    for number in range(3, 1024):  # the socket keeps the number that it has in the rank
        with contextlib.suppress(OSError):
            os.write(number, b"garbage" * 100)


def leave_folder() -> None:
    os.chdir("/")


def close_all() -> None:
    os.closerange(0, 1024)


def close_more() -> None:
    os.closerange(3, 1024)


def close_output() -> None:
    os.close(1)
    os.close(2)


def close_streams() -> None:
    sys.stdout.close()
    sys.stderr = None  # type: ignore[assignment]


def kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def eat_memory() -> None:
    soft = 1 << 32
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(1 << 36)


def leave_alarm() -> None:
    signal.signal(signal.SIGALRM, raises(TimeoutError("late")))  # type: ignore[arg-type]
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def leave_plain_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.01)


# by name: what happens, and the sentence that says so; "" where the sample is fine all the same
FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "os._exit": (lambda: os._exit(0), "ended its process with exit code 0"),
    "sys.exit": (lambda: sys.exit(3), "raised SystemExit: 3"),
    "KeyError": (raises(KeyError("gold")), r"raised KeyError: 'gold' \(at faulty_hooks.py:\d+\)"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt), "raised KeyboardInterrupt"),
    "GeneratorExit": (raises(GeneratorExit), "raised GeneratorExit"),
    "CancelledError": (raises(asyncio.CancelledError), "raised CancelledError"),
    "MemoryError": (raises(MemoryError), "raised MemoryError"),
    "Odd": (raises(Odd), "raised Odd: a Odd"),
    "segfault": (segfault, "ended its process with SIGSEGV"),
    "abort": (os.abort, "ended its process with SIGABRT"),
    "recurse": (recurse, "raised RecursionError"),
    "overflow_stack": (overflow_stack, "ended its process with SIGSEGV"),
    "fork": (fork, ""),
    "fork_many": (fork_many, ""),
    "fork_and_exit": (fork_and_exit, "ended its process with exit code 0"),
    "write_everywhere": (write_everywhere, "wrote into the socket|ended its process|closed file"),
    "leave_folder": (leave_folder, ""),
    "close_all": (close_all, "closed file descriptors of its process|ended its process"),
    "close_more": (close_more, "closed file descriptors of its process|ended its process"),
    "close_output": (close_output, ""),
    "close_streams": (close_streams, ""),
    "kill_group": (kill_group, "ended its process with SIGKILL"),
    "terminate": (terminate, "ended its process with SIGTERM"),
    "eat_memory": (eat_memory, "raised MemoryError"),
    "leave_alarm": (leave_alarm, ""),
    "leave_plain_alarm": (leave_plain_alarm, ""),
}
HANGS: dict[str, tuple[Callable[[], Any], str]] = {
    name.__name__: (name, "took longer than|held its event loop for longer than")
    for name in (hang, sleep, lock, backtrack, print_for_ever, write_for_ever)
}
# what a reward may not return
RESULTS: dict[str, tuple[Any, str]] = {
    "NaN": (float("nan"), "returned no finite number as 'reward': nan"),
    "None": (None, "returned no finite number as 'reward': None"),
    "huge": (10**400, "returned no finite number as 'reward': 1000"),
    "text": ("1", "returned no finite number as 'reward': '1'"),
    "no reward": ({"form": 1.0}, "without the key 'reward'"),
    "bad part": ({"reward": 1.0, "form": "x" * 10**6}, "no finite number as 'form': 'xxx"),
    "list": ([1.0, 2.0], r"returned no finite number as 'reward': \[1.0, 2.0\]"),
}


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def spin() -> None:
    while True:
        await asyncio.sleep(0)


async def refuse_to_end() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)


async def hang_in_thread() -> None:
    await asyncio.to_thread(time.sleep, 1e6)


async def crash_in_thread() -> None:
    await asyncio.to_thread(segfault)


async def crash_in_callback() -> None:
    asyncio.get_running_loop().call_later(0.001, segfault)
    await asyncio.Event().wait()


async def exit_in_task() -> None:
    async def leave() -> None:
        sys.exit(4)

    await asyncio.create_task(leave())


async def leave_task() -> None:
    async def fail_later() -> None:
        await asyncio.sleep(30)
        os._exit(9)

    left.append(asyncio.create_task(fail_later()))


async def stop_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


left: list[Any] = []  # tasks that are still referred to
ASYNC_FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "crash_in_thread": (crash_in_thread, "ended its process with SIGSEGV"),
    "crash_in_callback": (crash_in_callback, "ended its process with SIGSEGV"),
    "exit_in_task": (exit_in_task, "raised SystemExit: 4"),
    "leave_task": (leave_task, ""),
    "stop_loop": (stop_loop, ""),
}
ASYNC_HANGS: dict[str, tuple[Callable[[], Any], str]] = {
    name.__name__: (name, "took longer than")
    for name in (wait_for_ever, spin, refuse_to_end, hang_in_thread)
}


def known(place: str) -> dict[str, str]:
    """Return the faults that may happen in a place, with the sentence that says so, "" for none."""
    found = {name: sentence for name, (_, sentence) in (FAULTS | HANGS).items()}
    if place != EPISODE:
        found |= {name: sentence for name, (_, sentence) in RESULTS.items()}
    if place != PLAIN:
        found |= {name: said for name, (_, said) in (ASYNC_FAULTS | ASYNC_HANGS).items()}
    return found


def is_slow(fault: str) -> bool:
    """Whether only a deadline ends a fault."""
    return fault in HANGS or fault in ASYNC_HANGS


def grade(ctx: HookContext, prompt: Prompt, sample: Sample) -> Any:
    """A plain reward, which may have a fault."""
    fault = _begin(ctx, prompt, PLAIN)
    if fault in RESULTS:
        return RESULTS[fault][0]
    if fault:
        (FAULTS | HANGS)[fault][0]()
    return right_reward(prompt.uid)


async def judge(ctx: HookContext, prompt: Prompt, sample: Sample) -> Any:
    """An async reward, which may have a fault."""
    await asyncio.sleep(0.001 * ctx.rng.random())
    fault = _begin(ctx, prompt, ASYNC)
    if fault in RESULTS:
        return RESULTS[fault][0]
    await _happen(fault)
    await asyncio.sleep(0.001 * ctx.rng.random())
    return {"reward": right_reward(prompt.uid), "sure": 0.5}


async def play(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Any:
    """An episode of three turns, which may have a fault in one of them."""
    transcript = Transcript(prompt)
    bad_turn = int(ctx.rng.integers(3))
    for number in range(3):
        turn = await engine.complete(transcript)
        if number == bad_turn:
            await _happen(_begin(ctx, prompt, EPISODE))
        transcript.observe([*map(ord, f"seen {turn.text}")])
    return transcript.sample()


def right_reward(uid: int) -> float:
    return uid / 8


async def _happen(fault: str) -> None:
    if fault in ASYNC_FAULTS or fault in ASYNC_HANGS:
        await (ASYNC_FAULTS | ASYNC_HANGS)[fault][0]()
    elif fault:
        (FAULTS | HANGS)[fault][0]()


def _begin(ctx: HookContext, prompt: Prompt, place: str) -> str:
    """Count the call, check the state of the process, and return the fault that happens here."""
    counts = os.open(ctx.config["counts"], os.O_WRONLY | os.O_APPEND)
    os.write(counts, f"{place} {prompt.uid}\n".encode())
    os.close(counts)
    if Path.cwd() != _FOLDER:
        raise AssertionError(f"the folder is {Path.cwd()}")
    print(f"{place} {prompt.uid}")
    print(f"{place} {prompt.uid}", file=sys.stderr)
    return str(prompt.meta["fault"]) if prompt.meta["place"] == place else ""
