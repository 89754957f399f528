"""Where every process of a live run is: taken in each of them, asked for through a socket that only
its user can reach.

The controller listens on a UNIX socket in the run's private folder and names it in the run folder;
whoever connects gets the stacks of all ranks as text, and can say nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec

from spmd_rl.errors import ConfigError
from spmd_rl.observe.atomic_write import write_atomically

POINTER = "controller.json"
# those that this torch was built with
RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
ANSWER_S = 10.0  # for a live controller to gather all stacks and send them
MAX_ANSWER_BYTES = 1 << 26
MAX_POINTER_BYTES = 1 << 14
PEER = struct.Struct("iII")  # pid, uid and gid of who listens, as SO_PEERCRED gives them
_LIBRARIES = ("<frozen", *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")))
_OURS = str(Path(__file__).parents[2])


def all_stacks() -> str:
    """The Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def place_of_main_thread() -> str:
    """The line that the main thread is at, in the innermost file that is no library: "reward.py:12
    in score".
    """
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "nowhere"
    return (
        f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno} in {found.f_code.co_name}"
    )


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_OURS)


def flight_record() -> bytes:
    """torch's records of this process's collectives, by backend, as JSON; empty when it has none."""
    if (c10d := sys.modules.get("torch._C._distributed_c10d")) is None:
        return b""
    dumps = {backend: getattr(c10d, name, None) for backend, name in RECORDERS.items()}
    records = [
        b'"%s":%s' % (backend.encode(), dump())
        for backend, dump in dumps.items()
        if dump is not None
    ]
    return b"{%s}" % b",".join(records)


class Whereabouts(msgspec.Struct):
    """What the run folder says of its controller: `folder` is the private one that its socket is
    in.
    """

    host: str
    pid: int
    folder: str


class StackServer:
    """The controller's socket for `spmd-rl stacks`. `gather` runs on its thread and may block for
    seconds.
    """

    def __init__(self, folder: Path, run: Path, gather: Callable[[], str]) -> None:
        self._gather = gather
        self._pointer = run / POINTER
        self._listener = socket.socket(socket.AF_UNIX)
        with _reachable(folder) as near:
            self._listener.bind(f"{near}/stacks")
        self._listener.listen()
        where = Whereabouts(socket.gethostname(), os.getpid(), str(folder))
        # a run goes on where its folder is full: it only cannot be asked
        with contextlib.suppress(OSError):
            write_atomically(self._pointer, msgspec.json.encode(where).decode() + "\n")
        threading.Thread(target=self._serve, name="stacks", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        # ends the thread's wait, which a close alone does not
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._pointer.unlink()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:  # closed
                return
            with line, contextlib.suppress(OSError):  # whoever asked has gone
                line.settimeout(ANSWER_S)
                line.sendall(self._gather().encode())


def ask(run: Path) -> str:
    """The stacks of every process of the live run in folder `run`, fit to be printed.

    The folder may come from somebody else: only a controller of this user is listened to.
    Blocks: for `ANSWER_S` at most. Raises: ConfigError when no run lives there, or on another host.
    """
    try:
        where = msgspec.json.decode(_read_pointer(run / POINTER), type=Whereabouts)
    except OSError as error:
        raise ConfigError(f"no run is going on in {run}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{run / POINTER} does not say where a controller is: {error}") from error
    if where.host != socket.gethostname():
        raise ConfigError(f"the controller of {run} is on {printable(where.host)}: ask there")
    try:
        with socket.socket(socket.AF_UNIX) as line, _reachable(Path(where.folder)) as near:
            line.settimeout(ANSWER_S)
            line.connect(f"{near}/stacks")
            _, owner, _ = PEER.unpack(
                line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            )
            if owner != os.geteuid():
                raise ConfigError(
                    f"what {run / POINTER} names belongs to another user (uid {owner}): ask as that user"
                )
            return printable(_answer(line).decode(errors="backslashreplace"))
    except TimeoutError as error:
        raise ConfigError(
            f"the controller of {run} (pid {where.pid}) did not answer in {ANSWER_S:g} s"
        ) from error
    except (OSError, ValueError) as error:  # a folder's name may be none
        raise ConfigError(
            f"no run is going on in {run}: its controller (pid {where.pid}) is gone"
        ) from error


def printable(text: str) -> str:
    """`text` with control characters spelled out, as some of them command a terminal."""
    return "\n".join(
        line if line.isprintable() else _spelled_out(line) for line in text.split("\n")
    )


def _spelled_out(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line)


def _read_pointer(path: Path) -> bytes:
    # a pipe would block
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no file")
        return file.read(MAX_POINTER_BYTES)


def _answer(line: socket.socket) -> bytes:
    """All that comes until the other end closes, or as much as is taken. Raises: TimeoutError after
    `ANSWER_S`.
    """
    until, answer = time.monotonic() + ANSWER_S, bytearray()
    while len(answer) < MAX_ANSWER_BYTES and (chunk := line.recv(1 << 16)):
        answer += chunk
        line.settimeout(max(0.001, until - time.monotonic()))
    return bytes(answer)


def show(run: Path) -> None:
    """Print what `ask` gives on stderr, from a thread of its own: the caller, a signal's handler,
    has other work.
    """

    def look() -> None:
        try:
            text = ask(run)
        except ConfigError as error:  # it has not begun, or is ending
            text = f"no stacks: {error}"
        print(text, file=sys.stderr, flush=True)

    threading.Thread(target=look, name="show stacks", daemon=True).start()


@contextlib.contextmanager
def _reachable(folder: Path) -> Iterator[str]:
    """A short path to `folder`: the address of a UNIX socket holds no more than 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
