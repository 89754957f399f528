"""Drawing of `curves.png` and `report.html` while a run goes on, as a process of its own.

    python -m spmd_rl.report.redraw metrics.jsonl curves.png TITLE

The page is that of the folder of `metrics.jsonl`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.report import write_report
from spmd_rl.report.pictures.curves import draw


def main(metrics: Path, picture: Path, title: str) -> None:
    """Draw the picture, then write the page."""
    draw(read_metrics(metrics), picture, title)
    write_report([metrics.parent], goes_on=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
