"""The moment before the world hears why it ends: the terminal is left to that sentence, which says
how to go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from spmd_rl.errors import DeadlineError, DiskError, LostRankError, SpmdError

PATIENCE_S = 1.0  # with a disk and a terminal: nobody waits longer for either
GOES_ON = "the same command goes on"
# what a run that goes on need not meet again
FROM_OUTSIDE = (DeadlineError, DiskError, LostRankError)


class Farewell:
    """`newest` is the step after which the same command would go on, if any; `leave_screen` ends a
    live view.
    """

    def __init__(self) -> None:
        self.newest: Callable[[], int | None] = lambda: None
        self.leave_screen: Callable[[], object] = lambda: None

    def take(self, error: SpmdError) -> str:
        """The last words: `error`, which now says how to go on if the run is not to blame for it.
        The screen is left.

        Blocks: for `PATIENCE_S` at most.
        """
        found: list[int | None] = []
        thread = threading.Thread(target=self._look, args=[found], name="farewell", daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        from_outside = isinstance(error, FROM_OUTSIDE) and GOES_ON not in str(error)
        if from_outside and found and found[0] is not None:
            error.args = (f"{error}; {GOES_ON} after step {found[0]}",)
        return str(error)

    def _look(self, found: list[int | None]) -> None:
        # a checkpoint that cannot be read is told by the run that would
        with contextlib.suppress(Exception):
            found.append(self.newest())
        with contextlib.suppress(Exception):  # a terminal that is gone
            self.leave_screen()
