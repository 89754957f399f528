"""`report.html`: a run, or several side by side, as one page that needs no network.

Each file here reads one thing from a run folder and makes it small enough for a page; `page/` is
the page itself.
"""

from __future__ import annotations

from spmd_rl.report.build import write_report

__all__ = ["write_report"]
