"""Views of a run: the terminal while it goes on, `curves.png`, and the page `report.html`.

Most files here read one part of a run folder and reduce it to the size of a page. `page/` holds the
page itself, which needs no network.
"""

from __future__ import annotations

from spmd_rl.report.build import write_report

__all__ = ["write_report"]
