"""Sampler of Python stacks, which says where the seconds of a process went.

A thread looks at the main thread's stack a few hundred times a second. A sample weighs the time
since the one before, so a long call that holds the GIL counts in full. Forked processes are
sampled too. Each process writes its own file, again and again, because it may end at any time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

PAUSE_S = 0.004
WRITE_EVERY_S = 1.0
BACKWARD = "_engine_run_backward"  # the main thread waits here for a thread without a Python name

Sample = tuple[float, float, int]  # when it was taken (Unix time), seconds, number of its stack


class StackSampler:
    """Samples of one process: stacks are numbered, outermost frame first."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"stacks-{os.getpid()}.json"
        self._stacks: dict[tuple[str, ...], int] = {}
        self._samples: list[Sample] = []
        self._names: dict[tuple[str, int], str] = {}
        threading.Thread(target=self._run, name="stack sampler", daemon=True).start()

    def _run(self) -> None:
        main, own = threading.main_thread().ident, threading.get_ident()
        before, written = time.time(), time.time()
        while True:
            time.sleep(PAUSE_S)
            frames = sys._current_frames()
            now = time.time()
            stack = self._stack(frames.get(main or 0))
            if stack and BACKWARD in stack[-1]:
                named = {thread.ident for thread in threading.enumerate()}
                for ident in frames.keys() - named - {own}:
                    stack += self._stack(frames[ident])
            del frames
            number = self._stacks.setdefault(stack, len(self._stacks))
            self._samples.append((now, now - before, number))
            before = now
            if now - written > WRITE_EVERY_S:
                self._write()
                written = time.time()

    def _stack(self, frame: FrameType | None) -> tuple[str, ...]:
        frames = []
        while frame is not None:
            code = frame.f_code
            key = code.co_filename, code.co_firstlineno
            if key not in self._names:
                self._names[key] = f"{_short(code.co_filename)}:{code.co_name}"
            frames.append(self._names[key])
            frame = frame.f_back
        return tuple(reversed(frames))

    def _write(self) -> None:
        content = {"stacks": list(map(list, self._stacks)), "samples": self._samples}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.rename(self._path)


def _short(file: str) -> str:
    """Return the file's path below the folder of packages that holds it."""
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and file.startswith(folder + "/"):
            return file[len(folder) + 1 :]
    return file


def start(folder: Path) -> None:
    """Sample this process and those that it forks; their files go into `folder`."""
    StackSampler(folder)
    os.register_at_fork(after_in_child=lambda: StackSampler(folder) and None)


def main() -> None:
    """Run `spmd-rl` with the words after the folder."""
    folder, *words = sys.argv[1:]
    start(Path(folder))
    sys.argv = ["spmd-rl", *words]
    from spmd_rl.cli.main import main as spmd_rl_main

    sys.exit(spmd_rl_main())


if __name__ == "__main__":
    main()
