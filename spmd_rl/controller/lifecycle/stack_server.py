"""Stack server: `spmd-rl stacks` asks the controller of a live run for the stacks of all ranks.

The controller listens on a UNIX socket in the run's private folder, which only its user can reach,
and names that folder in the run folder. Whoever connects gets the stacks as text, and can send
nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.errors import ConfigError, printable
from spmd_rl.observe.atomic_write import write_atomically

POINTER_FILE = "controller.json"
ANSWER_S = 10.0  # for a live controller to gather all stacks and send them
MAX_ANSWER_BYTES = 1 << 26
MAX_POINTER_BYTES = 1 << 14
PEER = struct.Struct("iII")  # pid, uid and gid of the listening process, as SO_PEERCRED gives them


class ControllerPointer(msgspec.Struct):
    """The content of the file that points to a run's controller; `folder` holds its socket."""

    host: str
    pid: int
    folder: str


class StackServer:
    """The controller's socket for `spmd-rl stacks`.

    `gather` returns the text; it runs on this object's thread and may block for seconds.
    """

    def __init__(self, folder: Path, run: Path, gather: Callable[[], str]) -> None:
        self._gather = gather
        self._pointer = run / POINTER_FILE
        self._listener = socket.socket(socket.AF_UNIX)
        with _short_path(folder) as short:
            self._listener.bind(f"{short}/stacks")
        self._listener.listen()
        pointer = ControllerPointer(socket.gethostname(), os.getpid(), str(folder))
        # a run whose folder is full goes on, without `spmd-rl stacks`
        with contextlib.suppress(OSError):
            write_atomically(self._pointer, msgspec.json.encode(pointer).decode() + "\n")
        threading.Thread(target=self._serve, name="stacks", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        # a close alone would not end the thread's wait
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._pointer.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):  # the client has gone
                connection.settimeout(ANSWER_S)
                connection.sendall(self._gather().encode())


def ask(run: Path) -> str:
    """Return the stacks of every process of the live run in folder `run`, fit to be printed.

    Anybody may have written the folder, so that only a controller of this user is asked.
    Blocks: for `ANSWER_S` at most.
    Raises: ConfigError when no run is live there, or its controller is on another host.
    """
    pointer = _pointer_of(run)
    try:
        with (
            socket.socket(socket.AF_UNIX) as connection,
            _short_path(Path(pointer.folder)) as short,
        ):
            connection.settimeout(ANSWER_S)
            connection.connect(f"{short}/stacks")
            _require_same_user(connection, run)
            return printable(_read_answer(connection).decode(errors="backslashreplace"))
    except TimeoutError as error:
        raise ConfigError(
            f"the controller of {run} (pid {pointer.pid}) did not answer in {ANSWER_S:g} s"
        ) from error
    except (OSError, ValueError) as error:  # the pointer may name no valid path
        raise ConfigError(
            f"no run is going on in {run}: its controller (pid {pointer.pid}) is gone"
        ) from error


def _pointer_of(run: Path) -> ControllerPointer:
    """Return where the controller of a run is.

    Raises: ConfigError when no run is live there, or its controller is on another host.
    """
    try:
        pointer = msgspec.json.decode(_read_pointer(run / POINTER_FILE), type=ControllerPointer)
    except OSError as error:
        raise ConfigError(f"no run is going on in {run}{did_you_mean_path(run)}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{run / POINTER_FILE} does not say where a controller is: {error}"
        ) from error
    if pointer.host != socket.gethostname():
        raise ConfigError(f"the controller of {run} is on {printable(pointer.host)}: ask there")
    return pointer


def _read_pointer(path: Path) -> bytes:
    # opening a named pipe would block
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no file")
        return file.read(MAX_POINTER_BYTES)


def _require_same_user(connection: socket.socket, run: Path) -> None:
    """Raises: ConfigError when the process that listens is another user's."""
    _, owner, _ = PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    )
    if owner != os.geteuid():
        raise ConfigError(
            f"the controller that {run / POINTER_FILE} names belongs to another user "
            f"(uid {owner}): ask as that user"
        )


def _read_answer(connection: socket.socket) -> bytes:
    """Return what arrives until the other end closes, `MAX_ANSWER_BYTES` and a little at most.

    Raises: TimeoutError after `ANSWER_S`.
    """
    until, answer = time.monotonic() + ANSWER_S, bytearray()
    while len(answer) < MAX_ANSWER_BYTES and (chunk := connection.recv(1 << 16)):
        answer += chunk
        connection.settimeout(max(0.001, until - time.monotonic()))
    return bytes(answer)


def show(run: Path) -> None:
    """Print what `ask` returns on stderr, from a thread, since a signal handler must not wait."""

    def print_stacks() -> None:
        try:
            text = ask(run)
        except ConfigError as error:  # the run has not begun, or is ending
            text = f"no stacks: {error}"
        print(text, file=sys.stderr, flush=True)

    threading.Thread(target=print_stacks, name="show stacks", daemon=True).start()


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield a short path to `folder`: the address of a UNIX socket has at most 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
