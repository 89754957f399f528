"""Controller process: a child of rank 0, started before torch is loaded.

Rank 0 and the controller hold the two ends of a socket pair, the lifeline. The controller writes
its endpoint there, and the final message if the run fails. The end of the stream tells each side
that the other is gone, so that neither outlives the other.
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
from spmd_rl.controller.lifecycle.shutdown import FinalMessage, end_process
from spmd_rl.errors import DeadlineError, LostRankError, SpmdError
from spmd_rl.mesh.private_folder import PrivateFolder, sweep
from spmd_rl.mesh.world import World

ADDRESS_S = 300.0  # for the controller to import its recipe and bind its socket
EXIT_S = 120.0  # for the controller to draw and report after its workers, on a busy machine too
RANK_0_EXIT_S = 2.0  # for rank 0 to end once it has the final message


def start(words: list[str], environment: dict[str, str], lifeline: int) -> subprocess.Popen[bytes]:
    """Start `python -m spmd_rl controller` with these words and the descriptor of its lifeline."""
    return subprocess.Popen(
        [sys.executable, "-m", "spmd_rl", "controller", *words],
        env=environment,
        pass_fds=[lifeline],
        start_new_session=True,  # the ranks pass torchrun's signals on to it
    )


class ControllerProcess:
    """Rank 0's side of the controller process, which it starts.

    From then on, a failure of the controller ends this process.
    """

    def __init__(self, world: World, arguments: list[str]) -> None:
        sweep()
        self._folder = PrivateFolder().path
        self._secret_file = (
            None if secret.from_environment() else secret.create(secret.generated_file())
        )
        self._addresses: queue.SimpleQueue[Address] = queue.SimpleQueue()
        self._killed = False
        self.final_message = FinalMessage()
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            words = [*self._arguments(world, theirs), *arguments]
            self._process = start(words, self._environment(), theirs.fileno())
        threading.Thread(target=self._watch, name="controller watcher", daemon=True).start()

    def await_address(self) -> Address:
        """Return the address at which the controller listens.

        Blocks: until it has bound. Raises: DeadlineError after `ADDRESS_S`.
        """
        try:
            return self._addresses.get(timeout=ADDRESS_S)
        except queue.Empty:
            raise DeadlineError(
                f"the controller did not bind its socket within {ADDRESS_S:g} s"
            ) from None

    def kill(self) -> None:
        """Kill a controller that no longer answers, and remove its private folder."""
        self._killed = True
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self) -> int:
        """Return the exit code of the controller.

        Blocks: for `EXIT_S` at most. Raises: DeadlineError after it has killed the controller.
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

    def _arguments(self, world: World, lifeline: socket.socket) -> list[str]:
        return [str(lifeline.fileno()), str(self._folder), bind_address(world, self._folder)]

    def _environment(self) -> dict[str, str]:
        """Return this environment with the file of the secret.

        The controller gets one OpenMP thread, since the cores belong to the ranks.
        """
        secret_file = {secret.FILE_ENV: str(self._secret_file)} if self._secret_file else {}
        return os.environ | {"OMP_NUM_THREADS": "1"} | secret_file

    def _watch(self) -> None:
        with self._lifeline.makefile("r") as lines:
            for line in lines:
                record = json.loads(line)
                if "endpoint" in record:
                    self._addresses.put(Address(**record))
                else:
                    # the controller itself removes the private folder
                    end_process(**record)
        code = self._process.wait()
        if code and not self._killed:
            shutil.rmtree(self._folder, ignore_errors=True)
            lost = LostRankError(f"the controller (pid {self._process.pid}) {describe_exit(code)}")
            end_process(self.final_message.compose(lost), 1)


class Lifeline:
    """The controller's side of the lifeline."""

    def __init__(self, descriptor: int, folder: Path) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.folder = folder

    def close(self) -> None:
        """Remove the run's private folder and close the lifeline."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.socket.close()

    def exit(self, exit_code: int) -> NoReturn:
        """End the controller process now, whatever the recipe is doing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(exit_code)

    def announce(self, endpoint: str, generation: int) -> None:
        """Tell rank 0 the endpoint and generation that workers connect with."""
        self._write({"endpoint": endpoint, "generation": generation})

    def send_final_message(self, error: SpmdError) -> None:
        """Tell a rank 0 that has not said Hello why the run ends.

        Rank 0 ends the other ranks before they look for a secret that is being removed.
        Blocks: until rank 0 has ended, `RANK_0_EXIT_S` at most.
        """
        self._write({"sentence": str(error), "exit_code": error.exit_code})
        self.socket.settimeout(RANK_0_EXIT_S)
        with contextlib.suppress(OSError):  # the time is over, or a signal ended rank 0
            self.socket.recv(1)

    def _write(self, record: dict[str, str | int]) -> None:
        try:
            self.socket.sendall(json.dumps(record).encode() + b"\n")
        # rank 0 is gone, which the router notices too
        except (BrokenPipeError, ConnectionResetError):
            return


def describe_exit(code: int) -> str:
    """Return the clause that says how a process ended too early, with this exit code."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}{'' if code else ' before the run was over'}"
