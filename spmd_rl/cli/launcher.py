"""Launcher of the ranks of one machine: torchrun's agent, with forked ranks and one-line errors."""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.controller.lifecycle.controller_process import describe_exit
from spmd_rl.controller.lifecycle.process_family import Orphans
from spmd_rl.mesh.private_folder import PrivateFolder
from spmd_rl.mesh.shared_gpus import ranks_per_gpu
from spmd_rl.observe.start_phase import start_phase

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# The terminal is gone. It counts as a SIGTERM, unless it is ignored, as under nohup.
HANG_UP = signal.SIGHUP
EXIT_S = 5  # for the ranks to end after the run's grace
# One machine needs no heartbeat, and torch's may print an error after the run's exit message.
NO_HEARTBEAT_S = 10 * 365 * 86400

Rank = Callable[[list[str]], int]


def launch(num_ranks: int, rank: Rank, words: list[str], max_restarts: int, grace_s: float) -> int:
    """Run `num_ranks` ranks on this machine, print how the run ended, and return its exit code.

    With 0 there are as many ranks as the GPUs may have, else one. Each calls `rank(words)` for its
    exit code. The ranks are forked from this process, which has imported torch and never touches
    CUDA: that saves each of them seconds of start-up. When one fails, all are restarted,
    `max_restarts` times at most. After a SIGTERM they have `grace_s` and a little more.
    Blocks: until all ranks have ended.
    """
    _set_environment(grace_s)
    with start_phase(f"starting {_ranks(num_ranks)}: importing torch and the model code"):
        import torch._dynamo
        import torch.distributed.fsdp  # noqa: F401  for the ranks, which are forked from here
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _have_agent_fork()
    _leave_frames_unread()
    logging.disable(logging.CRITICAL)  # torchrun's report of a failure; ours is one sentence
    with PrivateFolder() as folder:
        config = _launch_config(num_ranks, max_restarts, folder)
        _raise_at_end_signals()  # until torchrun installs its own handlers, with the ranks
        orphans = Orphans()
        gc.freeze()  # a collection in a rank would go through them all, and copy their pages
        try:
            elastic_launch(config, _run_forked)(rank, words)
            _end_orphans(orphans)
        except ChildFailedError as error:
            _end_orphans(orphans)
            return _report_failed_rank(folder, error)
        except SignalException as error:
            _end_orphans(orphans)
            _print_exit_message(folder, f"the run was ended by {error.sigval.name}")
            return 128 + error.sigval.value
    return 0


def _ranks(num_ranks: int) -> str:
    if not num_ranks:
        return "a rank for each GPU, or one"
    return f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"


def _set_environment(grace_s: float) -> None:
    os.environ[exit_message.LAUNCHER_ENV] = str(os.getpid())
    # counting GPUs must not initialise CUDA before the fork
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # otherwise torchrun opens a port for the ranks
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_s) + EXIT_S))


def _have_agent_fork() -> None:
    """Have torchrun's agent fork the ranks from this process."""
    from torch.distributed.elastic import multiprocessing

    from spmd_rl.controller.lifecycle.forked_ranks import ForkedRanks

    multiprocessing.MultiprocessContext = ForkedRanks  # type: ignore[misc]  # the agent looks it up there


def _leave_frames_unread() -> None:
    """Have torchrun name the methods of its events without the source of every frame.

    To find the sources takes half a second of processor time in each start.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


def _launch_config(num_ranks: int, max_restarts: int, folder: Path) -> LaunchConfig:
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks or torch.cuda.device_count() * ranks_per_gpu() or 1,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "rendezvous"),
        rdzv_configs={"store_type": "file", "keep_alive_interval": NO_HEARTBEAT_S},
        max_restarts=max_restarts,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle=",".join(number.name for number in END_SIGNALS),
    )


def end_signals() -> list[signal.Signals]:
    """Return the signals that end a run."""
    hang_up = [HANG_UP] if signal.getsignal(HANG_UP) != signal.SIG_IGN else []
    return [*END_SIGNALS, *hang_up]


def _raise_at_end_signals() -> None:
    for number in end_signals():
        signal.signal(number, _raise_end)


def _raise_end(number: int, frame: FrameType | None) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    if number == HANG_UP:
        signal.signal(HANG_UP, signal.SIG_IGN)  # a shell that ends sends it again
    raise SignalException("", signal.SIGTERM if number == HANG_UP else signal.Signals(number))


def _run_forked(rank: Rank, words: list[str]) -> None:
    from spmd_rl.controller.lifecycle.forked_ranks import end_executors_at_exit

    logging.disable(logging.NOTSET)
    for number in (HANG_UP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the launcher gets it too, and acts on it
    _close_in_children(_open_pipes())
    end_executors_at_exit()
    sys.exit(rank(words))


def _open_pipes() -> list[int]:
    """Return the pipes that this process has open, without its standard streams."""
    links = {int(link.name): link for link in Path("/proc/self/fd").iterdir()}
    return [number for number, link in links.items() if number > 2 and link.is_fifo()]


def _close_in_children(pipes: list[int]) -> None:
    """Have processes forked from here close `pipes`.

    The launcher waits until no process has the pipes of a rank open.
    """

    def close() -> None:
        # A process forked from the child has none of them, and may use the numbers for others.
        while pipes:
            os.close(pipes.pop())

    os.register_at_fork(after_in_child=close)


def _end_orphans(orphans: Orphans) -> None:
    """End what the ranks left running; all ranks have ended, and signals come too late."""
    for number in end_signals():
        signal.signal(number, signal.SIG_IGN)
    orphans.end()


def _report_failed_rank(folder: Path, error: ChildFailedError) -> int:
    """Print how the rank that failed first ended, and return the exit code of the launcher."""
    first, failure = error.get_first_failure()
    fallback = f"rank {first} {describe_exit(failure.exitcode)}"
    _print_exit_message(folder, fallback, exit_message.WAIT_S, first)
    return max(failure.exitcode, 1)


def _print_exit_message(
    folder: Path, fallback: str, wait_s: float = 0.0, first_failed: int | None = None
) -> None:
    """Print the first exit message that the ranks left, or `fallback` if there is none.

    If it says that the rank `first_failed` is lost, it does not say how: `fallback` is added.
    Blocks: until there is a message, `wait_s` at most.
    """
    messages = exit_message.wait_for(lambda: exit_message.read_last_start(folder), wait_s)
    sentence = messages[0] if messages else fallback
    if re.match(rf"lost rank {first_failed}\b", sentence):
        sentence += f"; {fallback}"
    print(sentence, file=sys.stderr)
