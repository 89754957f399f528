"""Forked ranks, watched by torchrun's agent: a rank that exits before it returns has failed."""

from __future__ import annotations

import sys
import threading
from multiprocessing.util import Finalize
from typing import Any

from torch.distributed.elastic.multiprocessing import MultiprocessContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class ForkedRanks(MultiprocessContext):
    """The processes of the ranks that `spmd-rl run` forks.

    torch waits for the return value of each rank, and waits for ever if a rank exits with code 0
    before it returns. Here that rank has failed. torch also keeps a rank that has returned waiting
    for the others, and hangs if it does not; here it ends at once.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._worker_finished_event: Any = threading.Event()
        self._worker_finished_event.set()

    def _poll(self) -> RunProcsResult | None:
        result = super()._poll()
        rank = self._exited_early() if result is None else None
        if rank is None:
            return result
        self.close()
        failure = ProcessFailure(rank, self.pids()[rank], 0, self.error_files[rank])
        return RunProcsResult(failures={rank: failure}, stdouts=self.stdouts, stderrs=self.stderrs)

    def _exited_early(self) -> int | None:
        """Return the first rank of this host that ended with exit code 0 and has not returned."""
        for rank, process in enumerate(self._pc.processes if self._pc is not None else []):
            returned = (
                rank in self._return_values
                or process.exitcode != 0
                or not self._ret_vals[rank].empty()
            )
            if not returned:
                return rank
        return None


def end_executors_at_exit() -> None:
    """Have a rank end its process pools when it exits: multiprocessing waits for their processes.

    The rank has returned by then, so that a pool that does not end makes no failure of the run.
    """
    Finalize(None, _end_executors, exitpriority=100)


def _end_executors() -> None:
    if executors := sys.modules.get("concurrent.futures.process"):
        executors._python_exit()
