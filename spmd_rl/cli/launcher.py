"""torchrun for the ranks of one machine: they are forked, waited for, and accounted for in a
sentence.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.controller.lifecycle.controller_process import ending
from spmd_rl.controller.lifecycle.orphans import Orphans
from spmd_rl.mesh.private_folder import PrivateFolder

ENDINGS = (signal.SIGTERM, signal.SIGINT)
# the terminal is gone: nothing where that is ignored (nohup), else a SIGTERM
HANG_UP = signal.SIGHUP
END_S = 5  # for the ranks to end after the run's grace
# one machine needs none, and torch's may complain after the run's last words
NO_HEARTBEAT_S = 10 * 365 * 86400

Rank = Callable[[list[str]], int]


def launch(num_ranks: int, rank: Rank, words: list[str], max_restarts: int, grace_s: float) -> int:
    """Be torchrun for `num_ranks` ranks of this machine (0: one a GPU, else one), and say how the
    run ended.

    Each calls `rank(words)` for its exit code. They are forked from here, where torch is imported
    already and CUDA is never touched: that saves every rank seconds of start-up. When one fails,
    all are started again, `max_restarts` times at most. After a SIGTERM they have `grace_s` and a
    little more.
    Blocks: until all ranks have ended.
    """
    os.environ[exit_message.LAUNCHER_ENV] = str(os.getpid())
    # counting GPUs must not initialise CUDA before the fork
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # else torchrun opens a port for the ranks
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_s) + END_S))
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from spmd_rl.controller.lifecycle.forked_ranks import ForkedRanks

    multiprocessing.MultiprocessContext = ForkedRanks  # type: ignore[misc]  # the agent looks it up there
    logging.disable(logging.CRITICAL)  # torchrun's account of a failure; ours is one sentence
    with PrivateFolder() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks or torch.cuda.device_count() or 1,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(folder / "rendezvous"),
            rdzv_configs={"store_type": "file", "keep_alive_interval": NO_HEARTBEAT_S},
            max_restarts=max_restarts,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            signals_to_handle=",".join(number.name for number in ENDINGS),
        )
        for number in endings():
            signal.signal(number, _end_in_launch)  # until torchrun's own are there, with the ranks
        orphans = Orphans()
        try:
            elastic_launch(config, _forked)(rank, words)
            _end(orphans)
        except ChildFailedError as error:
            _end(orphans)
            first, failure = error.get_first_failure()
            ended = f"rank {first} {ending(failure.exitcode)}"
            _say(folder, ended, exit_message.WORDS_S, f"lost rank {first} (")
            return max(failure.exitcode, 1)
        except SignalException as error:
            _end(orphans)
            _say(folder, f"the run was ended by {error.sigval.name}")
            return 128 + error.sigval.value
    return 0


def endings() -> list[signal.Signals]:
    """The signals that end a run."""
    return [*ENDINGS, *([HANG_UP] if signal.getsignal(HANG_UP) != signal.SIG_IGN else [])]


def _end_in_launch(number: int, frame: FrameType | None) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    if number == HANG_UP:
        signal.signal(HANG_UP, signal.SIG_IGN)  # a shell that ends repeats what the terminal said
    raise SignalException("", signal.SIGTERM if number == HANG_UP else signal.Signals(number))


def _forked(rank: Rank, words: list[str]) -> None:
    from spmd_rl.controller.lifecycle.forked_ranks import end_executors_at_exit

    logging.disable(logging.NOTSET)
    for number in (HANG_UP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the launcher's affair, who is told as well
    _keep_from_children(_pipes())
    end_executors_at_exit()
    sys.exit(rank(words))


def _pipes() -> list[int]:
    """The pipes that this process holds, beside its standard streams."""
    links = {int(link.name): link for link in Path("/proc/self/fd").iterdir()}
    return [number for number, link in links.items() if number > 2 and link.is_fifo()]


def _keep_from_children(pipes: list[int]) -> None:
    """Have whatever is forked from here close `pipes`: the launcher waits until nobody holds those
    of a rank.
    """

    def close() -> None:
        # what is forked from there in turn has none of them, and perhaps others by these numbers
        while pipes:
            os.close(pipes.pop())

    os.register_at_fork(after_in_child=close)


def _end(orphans: Orphans) -> None:
    """All ranks have ended: whatever would end the run comes too late, and what they left running
    ends.
    """
    for number in endings():
        signal.signal(number, signal.SIG_IGN)
    orphans.end()


def _say(folder: Path, otherwise: str, wait_s: float = 0.0, lost: str = "") -> None:
    """What the first to end left, or `otherwise`, which words that begin with `lost` leave out.

    Words that came later would go with `folder`, or be a second line.
    """
    words = exit_message.awaited(lambda: exit_message.of_the_last_start(folder), wait_s)
    sentence = next(iter(words), otherwise)
    why = f"; {otherwise}" if lost and sentence.startswith(lost) else ""
    print(f"{sentence}{why}", file=sys.stderr)
