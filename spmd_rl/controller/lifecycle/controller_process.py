"""The controller as a child process of rank 0: started before anything heavy, and neither outlives
the other.

Both hold an end of one socket pair, the lifeline. The controller writes its endpoint there, and its
last words if the run fails; the end of the stream tells each side that the other is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.address import Address, bind_address
from spmd_rl.controller.lifecycle.exit_message import end_process
from spmd_rl.controller.lifecycle.shutdown import Farewell
from spmd_rl.errors import DeadlineError, LostRankError, SpmdError
from spmd_rl.mesh.private_folder import PrivateFolder, sweep
from spmd_rl.mesh.world import World

ADDRESS_S = 300.0  # for the controller to import its recipe and bind its socket
EXIT_S = 15.0  # for it to end after its workers
HEARD_S = 2.0  # for rank 0 to end of the controller's last words


class ControllerProcess:
    """Rank 0's view of the controller. From its construction on, the controller's failure ends this
    process.
    """

    def __init__(self, world: World, arguments: list[str]) -> None:
        sweep()
        self._folder = PrivateFolder().path
        self._secret_file = None if secret.given() else secret.create(secret.made_file())
        self._addresses: queue.SimpleQueue[Address] = queue.SimpleQueue()
        self._given_up = False
        self.farewell = Farewell()
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "spmd_rl",
                    "controller",
                    *self._seat(world, theirs),
                    *arguments,
                ],
                env=self._environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # torchrun's signals reach it through the ranks' last words
            )
        threading.Thread(target=self._watch, name="supervisor", daemon=True).start()

    def await_address(self) -> Address:
        """Where the controller listens.

        Blocks: until it has bound. Raises: DeadlineError after `ADDRESS_S`.
        """
        try:
            return self._addresses.get(timeout=ADDRESS_S)
        except queue.Empty:
            raise DeadlineError(
                f"the controller did not bind its socket within {ADDRESS_S:g} s"
            ) from None

    def kill(self) -> None:
        """End a controller that answers no more, and remove its private folder."""
        self._given_up = True  # its end is no news then
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self) -> int:
        """The controller's exit code. Blocks: for `EXIT_S` at most. Raises: DeadlineError, once it
        has killed it.
        """
        try:
            return self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise DeadlineError(
                f"the controller (pid {self._process.pid}) did not end with its run"
            ) from None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _seat(self, world: World, lifeline: socket.socket) -> list[str]:
        return [str(lifeline.fileno()), str(self._folder), bind_address(world, self._folder)]

    def _environment(self) -> dict[str, str]:
        """Ours, with the secret's file, and one thread: the cores belong to the ranks."""
        secret_file = {secret.FILE_ENV: str(self._secret_file)} if self._secret_file else {}
        return os.environ | {"OMP_NUM_THREADS": "1"} | secret_file

    def _watch(self) -> None:
        with self._lifeline.makefile("r") as lines:
            for line in lines:
                record = json.loads(line)
                if "endpoint" in record:
                    self._addresses.put(Address(record["endpoint"], record["generation"]))
                else:
                    # the controller removes the folder
                    end_process(record["sentence"], record["exit_code"])
        code = self._process.wait()
        if code and not self._given_up:
            shutil.rmtree(self._folder, ignore_errors=True)
            lost = LostRankError(f"the controller (pid {self._process.pid}) {ending(code)}")
            end_process(self.farewell.take(lost), 1)


class Lifeline:
    """The controller's end."""

    def __init__(self, descriptor: int, folder: Path) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.folder = folder

    def close(self) -> None:
        """Remove the run's private folder and let go of rank 0."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.socket.close()

    def leave(self, exit_code: int) -> NoReturn:
        """End the controller now, whatever the recipe is doing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(exit_code)

    def announce(self, endpoint: str, generation: int) -> None:
        """Tell rank 0 where to dial."""
        self._write({"endpoint": endpoint, "generation": generation})

    def last_words(self, error: SpmdError) -> None:
        """Tell rank 0 why the run ends, before the secret that ranks still look for is removed.

        Blocks: until rank 0 has ended, `HEARD_S` at most.
        """
        self._write({"sentence": str(error), "exit_code": error.exit_code})
        self.socket.settimeout(HEARD_S)
        with contextlib.suppress(OSError):  # the deadline, or rank 0's end by a signal
            self.socket.recv(1)

    def _write(self, record: dict[str, str | int]) -> None:
        try:
            self.socket.sendall(json.dumps(record).encode() + b"\n")
        # rank 0 is gone, and the socket thread knows
        except (BrokenPipeError, ConnectionResetError):
            return


def ending(code: int) -> str:
    """How a process ended that ended too early, with this exit code."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}{'' if code else ' before the run was over'}"
