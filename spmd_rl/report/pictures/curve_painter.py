"""Background drawing of picture and page, at so low a priority that no step waits for it.

    python -m spmd_rl.report.pictures.curve_painter metrics.jsonl curves.png TITLE

draws `curves.png`, and writes `report.html` of the folder of `metrics.jsonl`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.report import write_report
from spmd_rl.report.pictures.curves import draw
from spmd_rl.report.series import Row

LOWEST_PRIORITY = 19  # niceness
LEAST_S = 10.0  # between two drawings, each of which takes a processor for a second or two


class CurvePainter:
    """Draws the curves and writes the page in a background process.

    A request during a drawing, or soon after the last one began, is dropped.
    """

    def __init__(
        self, metrics: Path, path: Path, title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._path = path
        self._title = title
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._next_s = clock()  # when the next drawing may begin

    def request(self) -> None:
        """Start to draw the metrics written so far, unless the last drawing is too recent."""
        is_drawing = self._process is not None and self._process.poll() is None
        if not is_drawing and (now_s := self._clock()) >= self._next_s:
            self._next_s = now_s + LEAST_S
            arguments = [str(self._metrics), str(self._path), self._title]
            command = [sys.executable, "-m", "spmd_rl.report.pictures.curve_painter", *arguments]
            null = subprocess.DEVNULL  # errors are reported when `finish` draws again
            self._process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)

    def finish(self, rows: Sequence[Row]) -> None:
        """Draw `rows`, the final metrics. Blocks: until that is done, about a second."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for name in (self._path.name, "report.html"):
                for part in self._path.parent.glob(f"{name}.*.part"):
                    part.unlink()  # it was killed while it wrote
        draw(rows, self._path, self._title)


def redraw(metrics: Path, picture: Path, title: str) -> None:
    """Draw the picture, then write the page."""
    draw(read_metrics(metrics), picture, title)
    write_report([metrics.parent], goes_on=True)


if __name__ == "__main__":
    redraw(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
