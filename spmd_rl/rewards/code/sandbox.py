"""Sandbox: runs one program of a model by bubblewrap, with limits, and ends all its processes."""

from __future__ import annotations

import array
import fcntl
import json
import os
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from typing import Literal, NamedTuple

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.rewards.code.sandbox_command import program_command, sandbox_command
from spmd_rl.rewards.code.sandbox_filter import filter_program
from spmd_rl.rewards.config import CodeConfig

START_S = 30.0  # for bubblewrap to make its namespaces
SIGNALS = 256  # that wait, and timers; each has memory of the kernel
REAP_S = 10.0  # for bubblewrap to end once its program has ended
HOW_TO_GET_IT = (
    "install bubblewrap (apt-get install bubblewrap) and allow user namespaces "
    "(kernel.unprivileged_userns_clone = 1, user.max_user_namespaces > 0, and in a container "
    "--security-opt seccomp=unconfined), or grade programs on a server with reward = 'remote'"
)
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2000
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Outcome:
    """What a program printed on its standard output, and how it ended.

    `exit_code` is that of the program, or 128 and the number of the signal that ended it. It counts
    only where `ended_by` is "exit".
    """

    output: bytes
    exit_code: int
    ended_by: Literal["exit", "time", "output"]


def check_sandbox(cfg: CodeConfig) -> None:
    """Run nothing in a sandbox once. Raises: ConfigError where that cannot be done."""
    if sys.platform != "linux":
        raise ConfigError("reward 'code' needs Linux, or a server with reward = 'remote'")
    for program in ("bwrap", *(["setpriv"] if os.geteuid() == 0 else [])):
        if shutil.which(program) is None:
            raise ConfigError(f"reward 'code' needs {program}, which is missing: {HOW_TO_GET_IT}")
    command, *_ = program_command(cfg)
    words = ["/bin/sh", "-c", 'command -v "$0" > /dev/null && echo ready', command]
    try:
        outcome = run_in_sandbox(cfg, words, {}, b"", START_S)
    except SpmdError as error:
        raise ConfigError(f"reward 'code': {error}: {HOW_TO_GET_IT}") from error
    if outcome.output != b"ready\n":
        raise ConfigError(
            f"reward 'code': {command} cannot be run in the sandbox: name its folder in "
            "graders.code.read_only"
        )


def run_in_sandbox(
    cfg: CodeConfig,
    command: Sequence[str],
    files: Mapping[str, bytes],
    stdin: bytes,
    seconds: float,
) -> Outcome:
    """Run a command for so many seconds at most, and end whatever processes it has started.

    `files` are the contents of files in the sandbox's folder by their names.
    Raises: SpmdError when the sandbox cannot start, which is no fault of the program.
    """
    with ExitStack() as stack:
        started = start_in_sandbox(cfg, command, files, _file_of(stdin, stack), stack)
        output = _Output(started.process, cfg.output_kb << 10)
        ended_by = output.read(seconds if started.has_begun else START_S)
        if not started.has_begun or _holds_bytes(started.gate):  # it never came to the program
            raise SpmdError(f"the sandbox did not start: {output.errors or 'no reason is given'}")
        exit_code = started.process.wait() if ended_by == "exit" else 0
        return Outcome(bytes(output.data), exit_code, ended_by)


class StartedSandbox(NamedTuple):
    """A program that runs. It has begun unless bubblewrap has ended before.

    `gate` holds a byte until bubblewrap has come to the program.
    """

    process: subprocess.Popen[bytes]
    has_begun: bool
    gate: int


def start_in_sandbox(
    cfg: CodeConfig,
    command: Sequence[str],
    files: Mapping[str, bytes],
    stdin: int,
    stack: ExitStack,
) -> StartedSandbox:
    """Start a command, and have `stack` end whatever processes it has started.

    `stdin` is a descriptor or subprocess.PIPE. Both output streams are pipes. The sandbox ends with
    the thread that calls this.
    Blocks: until bubblewrap has made its namespaces, 30 s at most.
    """
    numbers = {name: _file_of(data, stack) for name, data in files.items()}
    calls = _file_of(filter_program(), stack) if filter_program() else None
    (told, teller), (gate, opener) = _pipe(stack), _pipe(stack)
    words = sandbox_command(
        cfg,
        command,
        files=numbers,
        status=teller.fileno(),
        gate=gate.fileno(),
        calls=calls,
        is_root=os.geteuid() == 0,
    )
    passed = [*numbers.values(), *([] if calls is None else [calls])]
    process = subprocess.Popen(
        words,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[*passed, teller.fileno(), gate.fileno()],
        cwd="/",
        bufsize=0,
    )
    stack.enter_context(process)
    stack.callback(_end, process)
    teller.close()
    first = _first_process(told.fileno())
    if first:
        pid, descriptor = first
        stack.callback(_end_tree, descriptor)
        _limit(cfg, pid)
        opener.write(b"x")
    return StartedSandbox(process, first is not None, gate.fileno())


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """Return the ends of a pipe to read and to write, which `stack` closes."""
    reading, writing = os.pipe()
    return stack.enter_context(FileIO(reading)), stack.enter_context(FileIO(writing, "w"))


class _Output:
    """What a process prints, up to `max_bytes` on both streams together."""

    def __init__(self, process: subprocess.Popen[bytes], max_bytes: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdout, self._stderr = process.stdout.fileno(), process.stderr.fileno()
        self._pid, self._left = process.pid, max_bytes
        self.data, self._errors = bytearray(), bytearray()
        for descriptor in (self._stdout, self._stderr):
            os.set_blocking(descriptor, False)

    @property
    def errors(self) -> str:
        """The end of what was printed as errors, on one line."""
        return " ".join(self._errors[-_TAIL_BYTES:].decode(errors="replace").split())

    def read(self, seconds: float) -> Literal["exit", "time", "output"]:
        """Read until the process ends, has printed too much, or the seconds are over."""
        ends_s = time.monotonic() + seconds
        exited = os.pidfd_open(self._pid)
        with selectors.DefaultSelector() as selector:
            try:
                for descriptor in (exited, self._stdout, self._stderr):
                    selector.register(descriptor, selectors.EVENT_READ)
                while (left_s := ends_s - time.monotonic()) > 0:
                    ready = [key.fd for key, _ in selector.select(left_s)]
                    for descriptor in ready:
                        if descriptor != exited and not self._take(descriptor):
                            selector.unregister(descriptor)
                    if exited in ready:
                        while self._take(self._stdout) or self._take(self._stderr):
                            pass
                    if self._left < 0:
                        return "output"
                    if exited in ready:
                        return "exit"
                return "time"
            finally:
                os.close(exited)

    def _take(self, descriptor: int) -> bool:
        """Read once; return whether there may be more."""
        if self._left < 0:
            return False
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        self._left -= len(data)
        if descriptor == self._stdout:
            self.data += data
        else:
            self._errors = (self._errors + data)[-_TAIL_BYTES:]
        return bool(data)


def _file_of(data: bytes, stack: ExitStack) -> int:
    """Return the descriptor of a file in memory, which nobody can change."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _first_process(told: int) -> tuple[int, int] | None:
    """Return the id and a descriptor of the first process; None if it has ended already."""
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([told], [], [], START_S)
        if not ready or not (data := os.read(told, 1)):
            return None
        line += data
    pid = int(json.loads(line)["child-pid"])
    try:
        return pid, os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _limit(cfg: CodeConfig, pid: int) -> None:
    """Set the limits of a process that still waits, and so of all that it will start."""
    limits = {
        resource.RLIMIT_CPU: cfg.cpu_s,
        resource.RLIMIT_AS: cfg.memory_mb << 20,
        # the first process has the program's own user, except where that is another than root
        resource.RLIMIT_NPROC: cfg.processes + (os.geteuid() != 0),
        resource.RLIMIT_FSIZE: cfg.file_mb << 20,
        resource.RLIMIT_NOFILE: cfg.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: SIGNALS,
    }
    with suppress(ProcessLookupError):  # what it said on its stderr is told later
        for kind, value in limits.items():
            _, hard = resource.prlimit(pid, kind)
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, kind, (most, most))


def _holds_bytes(pipe: int) -> bool:
    """Return whether a pipe has bytes that nobody has read."""
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0] > 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have bubblewrap reap its child, of which it hears before this, and see that it ends."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=REAP_S)
    process.kill()


def _end_tree(first: int) -> None:
    """Kill the sandbox's first process and wait until all others of its namespace are gone.

    `first` is a descriptor of the process. Linux lets it end after all others.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(first, signal.SIGKILL)
    select.select([first], [], [])
    os.close(first)
