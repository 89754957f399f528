"""The sandbox: what a program sees, what it may use, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.rewards.code import sandbox, sandbox_command, sandbox_filter
from spmd_rl.rewards.code.sandbox import check_sandbox
from spmd_rl.rewards.code.sandbox_filter import filter_program
from spmd_rl.rewards.config import CodeConfig
from tests.laws.source import ROOT
from tests.unit.rewards.sandboxed import Marked, needs_sandbox


@needs_sandbox
def test_a_program_reads_its_input_and_its_end_is_told() -> None:
    marked = Marked()
    outcome = marked.run("import sys\nprint(input().upper())\nsys.exit(3)", b"hello\n")
    assert (outcome.output, outcome.exit_code, outcome.ended_by) == (b"HELLO\n", 3, "exit")
    outcome = marked.run("import os\nos.write(1, b'x' * 100)\nos.kill(os.getpid(), 9)")
    assert outcome.output == b"x" * 100
    assert marked.run("raise ValueError").exit_code == 1


@needs_sandbox
def test_a_program_sees_no_file_of_this_host(tmp_path: Path) -> None:
    secret = tmp_path / "metrics.jsonl"
    secret.write_text("secret")
    paths = ["/etc/passwd", str(secret), str(ROOT / "setup.py"), str(Path.home()), "/sys", "/var"]
    program = f"import os, json\nprint(json.dumps([os.path.lexists(p) for p in {paths!r}[:3]]))\n"
    program += "print(json.dumps([sorted(os.listdir(p)) if os.path.isdir(p) else [] for p in "
    program += f"{paths!r}[3:] + ['/tmp']]))\nprint(len(os.environ), os.listdir('/proc/self/fd'))"
    seen, listed, rest = Marked().run(program).output.decode().splitlines()
    assert json.loads(seen) == [False, False, False]
    home, sys_folder, var, tmp = json.loads(listed)
    python = Path(sys.prefix).parts  # the way to it is there, wherever it lies
    ways = [Path(one) for one in (sys.prefix, sys.base_prefix, os.path.realpath(sys.executable))]
    depth = len(Path.home().parts)
    beneath = {way.parts[depth] for way in ways if way.is_relative_to(Path.home())}
    assert set(home) <= beneath, "only the way to Python"
    assert sys_folder == var == []
    assert set(tmp) <= {python[2]} if python[1] == "tmp" else tmp == []
    assert rest.endswith("['0', '1', '2', '3']"), "3 is the folder that is listed"


@needs_sandbox
@pytest.mark.parametrize("through", ["..", "link"])
def test_relative_paths_of_programs_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """A run may be started with `../env/bin/python`, and settings begin where it was started."""
    (here := tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(sys.prefix)
    prefix = str(tmp_path / "link") if through == "link" else os.path.relpath(sys.prefix, here)
    monkeypatch.chdir(here)
    python = os.path.join(prefix, os.path.relpath(sys.executable, sys.prefix))
    for name, path in (("executable", python), ("prefix", prefix)):
        monkeypatch.setattr(sys, name, path)
    check_sandbox(CodeConfig())
    tool = tmp_path / "tools/tool"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$1"\n')
    tool.chmod(0o755)
    check_sandbox(CodeConfig(command=("../tools/tool",), read_only=("../tools",)))


@needs_sandbox
def test_a_program_writes_nowhere_but_into_its_own_folders() -> None:
    program = """
import os
for path in ("/x", "/usr/x", "/dev/x", "/sandbox/x", "/sandbox/program.py", "/tmp/x", "/dev/shm/x"):
    try:
        open(path, "w").close()
        print(path)
    except OSError:
        pass
try:
    data = b"x" * (1 << 20)
    for number in range(200):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(data)
except OSError as error:
    print(number, error.strerror)
"""
    marked = Marked(memory_mb=64)
    lines = marked.run(program).output.decode().splitlines()
    assert lines == ["/tmp/x", "/dev/shm/x", "64 No space left on device"]
    assert not Path("/tmp/199").exists()


@needs_sandbox
def test_a_program_has_no_rights_and_an_identity_of_nobody() -> None:
    program = """
import os
status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
print(status["CapEff"].strip(), status["CapPrm"].strip(), status["NoNewPrivs"].strip())
print(os.getuid(), os.getgroups())
"""
    rights, identity = Marked().run(program).output.decode().splitlines()
    assert rights == "0" * 16 + " " + "0" * 16 + " 1"
    user, _, groups = identity.partition(" ")
    assert int(user) >= sandbox_command.NOBODY
    assert groups == "[]" or os.getuid() != 0


CONNECTS = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port})).sendall(b"here")
    print("connected")
except OSError as error:
    print(type(error).__name__)
print([name for _, name in socket.if_nameindex()])
"""


@needs_sandbox
def test_no_connection_leaves_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = CONNECTS.format(port=server.getsockname()[1])
        monkeypatch.setattr(sandbox, "filter_program", lambda: b"")  # which refuses any socket
        lines = Marked().run(program).output.decode().splitlines()
        assert lines == ["ConnectionRefusedError", "['lo']"]
        assert select.select([server], [], [], 0)[0] == []

        # the control: without the network namespace the same program arrives
        namespaces = sandbox_command.namespaces
        monkeypatch.setattr(
            sandbox_command,
            "namespaces",
            lambda is_root: [word for word in namespaces(is_root) if word != "--unshare-net"],
        )
        assert Marked().run(program).output.startswith(b"connected\n")
        assert select.select([server], [], [], 0)[0] == [server]


CALLS = """
import asyncio, ctypes, errno, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
def tried(*arguments):
    if libc.syscall(*arguments) >= 0:
        return "done"
    return errno.errorcode[ctypes.get_errno()]
print(*[tried(number, 0x10000000 if number == {unshare} else 0, 0, 0, 0) for number in {refused}])
print(tried({clone}, 0x10000000 | 17, 0, 0, 0, 0), tried({socketpair}, 40, 1, 0, 0))
print({{tried({socket}, family, kind, 0) for family in range(46) for kind in range(1, 6)}})
one, other = socket.socketpair()
one.sendall(b"connected")
threading.Thread(target=print, args=(other.recv(9).decode(),)).start()
async def main():
    print(await asyncio.to_thread(str, "loop"))
asyncio.run(main())
"""


REFUSED = set(
    "add_key bind bpf inotify_init inotify_init1 io_setup io_uring_setup keyctl listen "
    "memfd_create memfd_secret mount mq_open msgget perf_event_open ptrace request_key semget "
    "setns setsockopt shmat shmget unshare userfaultfd vmsplice".split()
)


@needs_sandbox
@pytest.mark.skipif(not filter_program(), reason="there is no filter for this machine")
def test_calls_that_namespaces_do_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, column = sandbox_filter._MACHINES[platform.machine()]
    refused = [numbers[column] for numbers in sandbox_filter._REFUSED.values()]
    refused = [number for number in refused if number is not None]
    partly = {name: numbers[column] for name, numbers in sandbox_filter._IN_PART.items()}
    unshare = sandbox_filter._REFUSED["unshare"][column]
    program = CALLS.format(unshare=unshare, refused=refused, **partly)
    first, second, *others = Marked().run(program).output.decode().splitlines()
    assert first.split() == ["EPERM"] * len(refused)
    assert (second, others) == ("EPERM EAFNOSUPPORT", ["{'EAFNOSUPPORT'}", "connected", "loop"])
    assert set(sandbox_filter._REFUSED) == REFUSED

    # the control: without the filter some of them are not refused so
    monkeypatch.setattr(sandbox, "filter_program", lambda: b"")
    first, *_ = Marked().run(program).output.decode().splitlines()
    assert set(first.split()) != {"EPERM"}


def test_the_filter_knows_two_machines() -> None:
    for machine in ("x86_64", "aarch64"):
        program = filter_program(machine)
        steps = [struct.unpack("HBBI", program[at : at + 8]) for at in range(0, len(program), 8)]
        for place, (code, if_true, if_false, _) in enumerate(steps):
            assert place + 1 + max(if_true, if_false) < len(steps) or code == 0x06
        assert steps[-1] == (0x06, 0, 0, 0x7FFF0000)
    assert filter_program("riscv64") == b""


LIMITS = {
    "forks": "import os\nn = 0\ntry:\n    while os.fork():\n        n += 1\n    os.pause()\n"
    "except OSError:\n    print(n)",
    "memory": "try:\n    bytearray(1 << 30)\nexcept MemoryError:\n    print('none')",
    "file": "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ntry:\n"
    "    open('/tmp/x', 'wb').write(b'x' * (3 << 20))\nexcept OSError as e:\n    print(e.strerror)",
    "open": "files = []\ntry:\n    while True:\n        files.append(open('/dev/null'))\n"
    "except OSError:\n    print(len(files))",
}


@needs_sandbox
@pytest.mark.parametrize(
    ("kind", "printed"),
    [("forks", "7"), ("memory", "none"), ("file", "File too large"), ("open", "29")],
)
def test_limits_hold(kind: str, printed: str) -> None:
    marked = Marked(processes=8, memory_mb=512, file_mb=2, open_files=32)
    assert marked.run(LIMITS[kind].replace("os.pause", "__import__('signal').pause")).output == (
        f"{printed}\n".encode()
    )
    assert marked.processes() == []


HOLDS = """
import contextlib, ctypes, fcntl, itertools, mmap, os, socket
KEPT = []
libc = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20
def checked(result):
    if result in (-1, 2 ** 64 - 1):
        raise OSError(ctypes.get_errno(), "refused")
    return result
def system_v(kept):
    libc.shmat.restype = ctypes.c_size_t
    segment = checked(libc.shmget(0, 8 * MIB, 0o1600))
    place = checked(libc.shmat(segment, None, 0))
    ctypes.memset(place, 1, 8 * MIB)
    libc.shmdt(ctypes.c_void_p(place))
    return 8
def queues(kept):
    number = checked(libc.msgget(0, 0o1600))
    message = ctypes.create_string_buffer(b"x" * 8000)
    checked(libc.msgsnd(number, ctypes.byref(message), 8000, 0o4000))
    checked(libc.msgsnd(number, ctypes.byref(message), 8000, 0o4000))
    return 1 / 64
def semaphores(kept):
    checked(libc.semget(0, 32000, 0o1600))
    return 2
def posix_queues(kept):
    name = f"/q{len(kept)}".encode()
    number = ctypes.CDLL("librt.so.1", use_errno=True).mq_open(name, 0o102, 0o600, None)
    return 1 / 16 if checked(number) else 0
def memory_files(kept):
    kept.append(os.memfd_create("x"))
    os.write(kept[-1], bytes(8 * MIB))
    return 8
def pipes(kept):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        fcntl.fcntl(writes, 1031, MIB)
    except OSError:
        pass
    return os.write(writes, bytes(MIB)) / MIB
def sockets(kept):
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, name, 64 * MIB)
    return sum(filled(end, pair) for end in pair)
def filled(end, kept_too):
    size = 0
    KEPT.append(kept_too)
    with contextlib.suppress(BlockingIOError):
        while size < 64 * MIB:
            size += end.send(bytes(16 << 10))
    return size / MIB
def datagrams(kept):
    pair = socket.socketpair(type=socket.SOCK_DGRAM)
    for end in pair:
        end.setblocking(False)
    return sum(filled(end, pair) for end in pair)
def unaccepted(kept):
    server = KEPT[0] if KEPT else None
    if not KEPT:
        server = socket.socket(socket.AF_UNIX)
        server.bind("/tmp/s")
        server.listen(4096)
        KEPT.append(server)
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    client.connect("/tmp/s")
    size = filled(client, None)
    client.close()
    return size
def tcp(kept):
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.setblocking(False)
    return filled(client, server)
def watches(kept):
    number = checked(libc.inotify_init1(0))
    checked(libc.inotify_add_watch(number, b"/tmp", 0xFFF))
    return 1 / 16
def temporary_files(kept):
    with open(f"/tmp/{len(kept)}", "wb") as file:
        file.write(bytes(8 * MIB))
    return 8
def posix_shared(kept):
    with open(f"/dev/shm/{len(kept)}", "wb") as file:
        file.write(bytes(8 * MIB))
    return 8
def shared_maps(kept):
    kept.append(mmap.mmap(-1, 8 * MIB))
    kept[-1].write(bytes(8 * MIB))
    return 8
def held(kind):
    kept, size = [], 0
    try:
        while size < 512 and len(kept) < 4096:
            size += globals()[kind](kept)
            kept.append(None)
    except (OSError, MemoryError):
        pass
    return size
def in_children(kind):
    reads, writes = os.pipe()
    children, total = 0, 0
    try:
        while os.fork():
            children += 1
        os.write(writes, bytes([int(held(kind)) // 8]))
        __import__("signal").pause()
    except OSError:
        pass
    return sum(os.read(reads, 1)[0] * 8 for _ in range(children))
print({call})
"""
# MiB that a program may hold, where each process may have 64
HELD = {
    "system_v": 0,
    "queues": 0,
    "semaphores": 0,
    "posix_queues": 0,
    "memory_files": 0,
    "pipes": 2,
    "sockets": 13,
    "datagrams": 13,
    "unaccepted": 0,
    "tcp": 0,
    "watches": 0,
    "temporary_files": 64,
    "posix_shared": 64,
    "shared_maps": 63,
}


@needs_sandbox
@pytest.mark.skipif(not filter_program(), reason="there is no filter for this machine")
@pytest.mark.parametrize("kind", HELD)
def test_no_kind_of_memory_is_without_a_limit(kind: str) -> None:
    marked = Marked(memory_mb=64, open_files=64)
    program = HOLDS.replace("{call}", f"held({kind!r})")
    outcome = marked.run(program)
    assert outcome.exit_code == 0 and float(outcome.output) <= HELD[kind]


@needs_sandbox
def test_shared_maps_of_all_processes_are_bounded() -> None:
    """Each process may have as much as one, and there are four children at most."""
    marked = Marked(memory_mb=64, processes=5)
    outcome = marked.run(HOLDS.replace("{call}", "in_children('shared_maps')"))
    assert 0 < int(outcome.output) <= 4 * 63


STAYS = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pause()
        os._exit(0)
print("gone", flush=True)
"""


@needs_sandbox
def test_processes_that_want_to_stay_are_gone() -> None:
    marked = Marked()
    assert marked.run(STAYS).output == b"gone\n"
    assert marked.processes() == []
    outcome = marked.run(STAYS + "signal.pause()", seconds=1.0)
    assert outcome.ended_by == "time"
    assert marked.processes() == []


@needs_sandbox
def test_one_that_prints_without_end_is_ended() -> None:
    marked = Marked(output_kb=64)
    for stream in ("stdout", "stderr"):
        outcome = marked.run(f"import sys\nwhile True:\n    print('x' * 99, file=sys.{stream})")
        assert outcome.ended_by == "output"
        assert len(outcome.output) < 200_000
    assert marked.processes() == []


@needs_sandbox
def test_a_program_cannot_kill_what_has_started_it() -> None:
    marked = Marked()
    program = """
import os, signal
for pid in (os.getppid(), 1, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("alive")
"""
    assert marked.run(program).output == b"alive\n"
    assert marked.processes() == []


@needs_sandbox
def test_processor_time_is_bounded() -> None:
    outcome = Marked(cpu_s=1).run("while True: pass")
    assert outcome.ended_by == "exit" and outcome.exit_code == 128 + signal.SIGKILL


KILLED = """
import os, signal, sys
from spmd_rl.rewards.code import sandbox
from tests.unit.rewards.sandboxed import Marked
take, limit, pids = sandbox._Output._take, sandbox._limit, []
def limited(cfg, pid):
    pids.append(pid)
    limit(cfg, pid)
def taken(self, descriptor):
    more = take(self, descriptor)
    if self.data:
        print(pids[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return more
sandbox._Output._take, sandbox._limit = taken, limited
Marked().run("import signal; print('runs', flush=True); signal.pause()")
"""


@needs_sandbox
def test_a_program_ends_with_the_process_that_started_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(int(done.stdout))
        assert select.select([descriptor], [], [], 60)[0], "the program still runs"
        os.close(descriptor)


@needs_sandbox
def test_a_sandbox_that_cannot_start_is_no_fault_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_command, "SYSTEM", ("/usr", "/bin/sh"))
    monkeypatch.setattr(sandbox_command, "ENVIRONMENT", {})
    marked = Marked(read_only=("/no/such/folder",))
    with pytest.raises(SpmdError, match="the sandbox did not start: bwrap: Can't find source"):
        marked.run("print('bwrap: No')")
    # nor can a program pass for one
    assert Marked().run("import sys; sys.exit('bwrap: No')").ended_by == "exit"


def test_a_host_without_bubblewrap_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs bwrap, which is missing: install bubblewrap"):
        check_sandbox(CodeConfig())


def test_a_host_that_refuses_namespaces_is_told_what_to_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    for name in ("bwrap", "setpriv"):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        ConfigError,
        match=r"did not start: bwrap: No permissions to create new namespace: install.*remote",
    ):
        check_sandbox(CodeConfig())


@needs_sandbox
def test_a_command_that_the_sandbox_does_not_show_is_told(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    tmp_path.chmod(0o755)  # as root, programs are of another user
    with pytest.raises(ConfigError, match=r"cannot be run in the sandbox: name its folder in gra"):
        check_sandbox(CodeConfig(command=(str(tool),)))
    check_sandbox(CodeConfig(command=(str(tool),), read_only=(str(tmp_path),)))


UNPRIVILEGED = """
from spmd_rl.rewards.config import CodeConfig
from spmd_rl.rewards.code.sandbox import check_sandbox, run_in_sandbox
cfg = CodeConfig(processes=8)
check_sandbox(cfg)
program = '''
import os
n = 0
try:
    while os.fork():
        n += 1
except OSError:
    print(os.getuid(), n, os.path.exists("/etc/passwd"))
else:
    import signal
    signal.pause()
'''
command = ["/usr/bin/python3", "/sandbox/program.py"]
print(run_in_sandbox(cfg, command, {"program.py": program.encode()}, b"", 60).output.decode())
"""


@needs_sandbox
@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run without root's rights already")
def test_without_roots_rights_the_sandbox_is_the_same() -> None:
    user = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]
    python = [*user, "/usr/bin/python3", "-c"]
    words = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    tried = subprocess.run([*python, "import spmd_rl.rewards.config"], **words)  # type: ignore[call-overload]
    if tried.returncode:
        pytest.skip("another user cannot read this checkout, or lacks a Python of 3.11")
    done = subprocess.run([*python, UNPRIVILEGED], **words)  # type: ignore[call-overload]
    assert done.stdout.strip() == "65534 7 False", done.stderr
