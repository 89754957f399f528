"""Report page: gathers the data of run folders, and writes the page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.errors import ConfigError
from spmd_rl.observe.atomic_write import write_atomically
from spmd_rl.observe.metrics import METRICS
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.report.about import about, read_provenance, without_command
from spmd_rl.report.means import num_latest
from spmd_rl.report.page import render
from spmd_rl.report.panels import PHASES
from spmd_rl.report.pictures.charts import charts
from spmd_rl.report.pictures.time_axes import seconds_before_step_1, training_rows, wall_s
from spmd_rl.report.progress import weights_text
from spmd_rl.report.samples import PageBudget, read_samples
from spmd_rl.report.series import (
    KEY_FIGURES,
    MAX_POINTS,
    Figure,
    Row,
    curves,
    key_figures,
    winner,
)
from spmd_rl.report.settings import as_text, differences, read_config, read_plan
from spmd_rl.report.spans import MAX_SPANS, read_timeline
from spmd_rl.report.verdicts.changes import what_changed
from spmd_rl.report.verdicts.findings import Setup
from spmd_rl.report.verdicts.run_differences import run_differences, up_to_common_step
from spmd_rl.report.verdicts.turned import turned_prompts

MAX_RUNS = 8
RELOAD_S = 20  # between two looks of a page for a newer one
DOCS = Path(__file__).resolve().parents[2] / "docs"  # of a checkout


def write_report(runs: Sequence[Path], out: Path | None = None, *, goes_on: bool = False) -> Path:
    """Write the page of one run, or the comparison of several, and return its path.

    It is `report.html` in the run's folder, or `compare.html` in the folder that holds the first
    run's folder. Where the run `goes_on`, the page reloads itself.
    Raises: ConfigError when a path is not a run folder, DataError when one of its files is damaged.
    """
    page = out or (runs[0] / "report.html" if len(runs) == 1 else runs[0].parent / "compare.html")
    data = gather(runs, docs=_docs_from(page.parent))
    write_atomically(page, render(data | {"reload_s": RELOAD_S if goes_on else 0}))
    return page


def _docs_from(folder: Path) -> str:
    """Return the way from the page's folder to the pages of docs/; "" where they are not here."""
    return os.path.relpath(DOCS.parent, folder.resolve()) + "/" if DOCS.is_dir() else ""


def gather(runs: Sequence[Path], *, small: bool = False, docs: str = "") -> dict[str, Any]:
    """Return all that the page shows, as plain data; `small` leaves out samples and timelines.

    `docs` goes before a path such as docs/loop.md, to make a link of it.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"a report shows 1 to {MAX_RUNS} runs: name fewer than {len(runs)}")
    shown = [
        _run(run, name, len(runs), small) for run, name in zip(runs, _names(runs), strict=True)
    ]
    rows_of = {run["name"]: run.pop("rows") for run in shown}
    for run in shown:
        figures = key_figures(up_to_common_step(rows_of[run["name"]], rows_of))
        run["figures"] = [figure and figure._asdict() for figure in figures]
    return {
        "title": " · ".join(run["name"] for run in shown),
        "made_unix_s": int(time.time()),
        "docs": docs,
        "metrics": {metric.name: vars(metric) for metric in METRICS},
        "phase_colours": {name: colour.variable for name, colour in PHASES.items()},
        **charts(shown),
        "figures": _figures(shown),
        "differences": _differences(shown),
        "comparisons": run_differences(rows_of) if len(runs) > 1 else [],
        "runs": shown,
    }


def _figures(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the key figures, each with the index of the run that is best in it, if any."""
    values = zip(KEY_FIGURES, *(run["figures"] for run in runs), strict=True)
    return [
        vars(figure) | {"winner": winner(figure, [one and Figure(**one) for one in of_runs])}
        for figure, *of_runs in values
    ]


def _differences(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return the settings and facts that differ between the runs."""
    return differences(
        [run["settings"] | without_command(run["about"]) for run in runs],
        [Path(run["folder"]) for run in runs],
    )


def _run(run: Path, name: str, num_runs: int, small: bool) -> dict[str, Any]:
    if not (run / "config.toml").is_file() and not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run} is not the folder of a run: it has neither config.toml nor metrics.jsonl"
            f"{did_you_mean_path(run)}"
        )
    rows, config = read_metrics(run / "metrics.jsonl"), read_config(run)
    plan, facts, budget = read_plan(run), read_provenance(run), PageBudget().share(num_runs)
    return {
        "name": name,
        "rows": rows,
        "folder": str(facts.get("folder", "")),
        "about": about(run, config, plan, facts) | _weights(rows),
        "before": seconds_before_step_1(rows),
        "wall_s": wall_s(rows),
        "num_latest": num_latest(len(training_rows(rows))),
        "changes": what_changed(rows, Setup(config, run)),
        "turned": [] if small else turned_prompts(run, small=num_runs > 1),
        "curves": curves(rows, MAX_POINTS // min(num_runs, 3)),
        "settings": {key: as_text(value) for key, value in config.items()},
        "defaults": _defaults(facts.get("defaults")),
        "plan": plan,
        "samples": {"steps": [], "num_steps": 0} if small else read_samples(run, config, budget),
        "timeline": None if small else read_timeline(run, max_spans=MAX_SPANS // num_runs),
    }


def _defaults(found: Any) -> dict[str, str | None] | None:
    """Return the defaults of the settings that differ from them; None in runs without that fact."""
    if not isinstance(found, dict):
        return None
    return {key: None if value is None else as_text(value) for key, value in found.items()}


def _weights(rows: Sequence[Row]) -> dict[str, str]:
    """Return what the run's last comparison of weights found, as a fact; empty without one."""
    texts = filter(None, map(weights_text, reversed(rows)))
    return dict([("engine's weights", text)] if (text := next(texts, "")) else [])


def _names(runs: Sequence[Path]) -> list[str]:
    """Return the folders' names, each with as many parents as make all names different."""
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts))):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{run} ({number})" for number, run in enumerate(runs, 1)]
