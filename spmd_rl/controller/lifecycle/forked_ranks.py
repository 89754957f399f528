"""The ranks that `spmd-rl run` forks, as torchrun's agent watches them: who is gone before it
returned has failed.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.util import Finalize
from typing import Any

from torch.distributed.elastic.multiprocessing import MultiprocessContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class ForkedRanks(MultiprocessContext):
    """torch waits for what each rank returns, and for ever if a rank left with exit code 0 before
    that.

    A rank that has returned ends at once: torch would have it wait for the others, and hang if it
    did not.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._worker_finished_event: Any = threading.Event()
        self._worker_finished_event.set()

    def _poll(self) -> RunProcsResult | None:
        result = super()._poll()
        rank = self._left_early() if result is None else None
        if rank is None:
            return result
        self.close()
        failure = ProcessFailure(rank, self.pids()[rank], 0, self.error_files[rank])
        return RunProcsResult(failures={rank: failure}, stdouts=self.stdouts, stderrs=self.stderrs)

    def _left_early(self) -> int | None:
        """The first rank of this host that ended with exit code 0 and has not returned."""
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
    """Have a rank tell its process pools to end when it does: multiprocessing waits for their
    processes.

    It has returned by then, so a pool that does not end makes no failure of its run.
    """
    Finalize(None, _end_executors, exitpriority=100)


def _end_executors() -> None:
    if executors := sys.modules.get("concurrent.futures.process"):
        executors._python_exit()
