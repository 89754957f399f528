"""Background drawing of `curves.png` in a low-priority process, so that no step waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spmd_rl.report.curve_axes import Rows
from spmd_rl.report.curves import draw

LOWEST_PRIORITY = 19  # niceness


class CurvePainter:
    """Draws the curves in a background process. A request during a drawing is dropped."""

    def __init__(self, metrics: Path, path: Path, title: str) -> None:
        self._metrics = metrics
        self._path = path
        self._title = title
        self._process: subprocess.Popen[bytes] | None = None

    def request(self) -> None:
        """Start to draw the metrics written so far, unless a drawing is under way."""
        if self._process is None or self._process.poll() is not None:
            arguments = [str(self._metrics), str(self._path), self._title]
            command = [sys.executable, "-m", "spmd_rl.report.curves", *arguments]
            null = subprocess.DEVNULL  # errors are reported when `finish` draws again
            self._process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)

    def finish(self, rows: Rows) -> None:
        """Draw `rows`, the final metrics. Blocks: until that is done, about a second."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        draw(rows, self._path, self._title)
