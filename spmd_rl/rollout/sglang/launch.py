"""Launch of the child: a clean environment, a rendezvous of its own, and its end with its rank's.

The child dies with the thread that started it, because Linux sends its parent-death signal then. So
a rank starts its child from the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.errors import DeadlineError, LostRankError, SpmdError
from spmd_rl.mesh.environment import without_world
from spmd_rl.rollout.interpreter import Interpreter, meeting_environment
from spmd_rl.rollout.sglang.messages import MESSAGES, ChildReady, ChildSpec
from spmd_rl.rollout.sglang.options import SglangSite
from spmd_rl.weights.slab.peer_socket import PeerSocket

CHILD_PROGRAM = Path(__file__).with_name("child.py")
END_DEADLINE_S = 30.0


@dataclass(frozen=True)
class ChildWorld:
    """The process group of the schedulers of one engine, and the child's rank in it.

    They meet in the file `store`, which lies in a folder that no other user can enter.
    """

    rank: int
    size: int
    store: Path


def clean_environment(
    environment: Mapping[str, str], world: ChildWorld, interpreter: Interpreter, site: SglangSite
) -> dict[str, str]:
    """Return the child's environment: this one without the variables of the world around it.

    What the user has set for NCCL holds for children that communicate, but for what SGLang needs
    off. Multicast is off too unless the user says otherwise: torch sets it up for memory that all
    ranks share, also where nothing uses it.
    """
    kept = without_world(environment)
    if world.size > 1:
        kept |= {name: value for name, value in environment.items() if name.startswith("NCCL_")}
        kept.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    added = meeting_environment(world.store) | {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "SGLANG_USE_PICKLE_IPC": "0",
        # trainers beside the schedulers take what they take
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "TQDM_DISABLE": "1",  # its bars would fill the rank's log
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": interpreter.search_path,
    }
    if site.memory_saver:
        added["LD_PRELOAD"] = site.memory_saver
    return kept | added


class Child:
    """The process of one scheduler. `name` names it in errors."""

    def __init__(
        self, interpreter: Interpreter, site: SglangSite, rank: int, world: ChildWorld
    ) -> None:
        """Start the process; `wait_until_ready` then has to be called.

        Raises: SpmdError outside of the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise SpmdError("start the SGLang engine from the main thread: it ends with its thread")
        ours, theirs = socket.socketpair()
        command = [interpreter.command, str(CHILD_PROGRAM), str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=clean_environment(os.environ, world, interpreter, site),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.name = name_of(rank, self._process.pid)
        self.socket = PeerSocket(ours, self.name, MESSAGES)
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, spec: ChildSpec, deadline_s: float) -> ChildReady:
        """Send the child what it is to do, and return its answer once it generates.

        Blocks: until then; `deadline_s` ends it.
        Raises: SpmdError with the child's own sentence, or with its exit code.
        """
        try:
            self.socket.send(spec)
            answer = self.socket.receive(deadline_s)
        except LostRankError:
            raise self.ended() from None
        except DeadlineError:
            self.stop()
            raise DeadlineError(
                f"{self.name} was not ready within engine.start_deadline_s = {deadline_s:g} s"
            ) from None
        except SpmdError:
            self.stop()
            raise
        if not isinstance(answer, ChildReady):
            raise SpmdError(f"{self.name} answered {type(answer).__name__} to its start")
        return answer

    def ended(self) -> SpmdError:
        """Return the error that says how the child ended, which has closed its socket."""
        try:
            code = self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.stop()
            return LostRankError(f"{self.name} closed its socket, and was ended")
        self.stop()
        return LostRankError(f"{self.name} ended with {_in_words(code)}; its output says why")

    def raise_failure(self) -> None:
        """Raise the error of a child whose socket can be read although nothing was asked of it."""
        try:
            self.socket.receive(END_DEADLINE_S)
        except LostRankError:
            raise self.ended() from None
        raise SpmdError(f"{self.name} sent a message that nobody had asked for")

    def discard_failure(self) -> None:
        """Read what the child says of a call that failed, which its answer to the call says too."""
        with contextlib.suppress(SpmdError):
            self.socket.receive(END_DEADLINE_S)

    def stop(self) -> None:
        """End the child and all that it started. It may be called again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.socket.close()


def name_of(rank: int, pid: int) -> str:
    """Return the name of a rank's child in errors."""
    return f"the SGLang process of rank {rank} (pid {pid})"


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"exit code {code} ({signal.Signals(-code).name})"
