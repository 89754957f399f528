"""Charts of the report page: which lines each has, and which metrics need no chart.

A run here is what `build.gather` returns of it: its `curves` have a column for each metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.panels import LEVEL, PANEL_OF_METRIC, PANELS, TABLES, Line, Panel
from spmd_rl.report.pictures.colours import LINES
from spmd_rl.report.verdicts.main_scores import main_score

Run = dict[str, Any]
Chart = dict[str, Any]

EVALUATION = re.compile(r"eval/(.+)/([^/]+)")
ALL_SETS = "all sets"
PART = "reward/"  # prefix of the parts of a reward
OTHER_TIME = "time/other"  # the time of a step outside all phases, which no column has
STEP_TIME = "time/step"
_NOT_DRAWN = re.compile(r"pass@1|.*_error")  # the first is avg@n under another name
_SCORES = TABLES["scores"]


def charts(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the `charts` of one run, or those that compare several, and what is `constant`.

    A chart has `lines`, each with the index of its run, its metric, label and colour. A metric that
    never changes is no chart but a text, such as "learning rate 0.001".
    """
    drawn = [*_charts_and_texts(runs)]
    return {
        "charts": [chart for _, chart, text in drawn if text is None],
        "constant": [text for *_, text in drawn if text is not None],
    }


def main_charts(run: Run) -> list[Chart]:
    """Return the charts of `curves.png`, without those that never change, unless that is news."""
    return [
        chart
        for panel, chart, text in _charts_and_texts([run])
        if panel.main and (text is None or panel.news_if_flat)
    ]


def _charts_and_texts(runs: Sequence[Run]) -> Iterator[tuple[Panel, Chart, str | None]]:
    """Yield each chart that has lines, with its text if it never changes."""
    for panel, meaning in _panels(runs[0]) if len(runs) == 1 else _panels_of_many(runs):
        chart = _chart(panel, meaning, runs)
        if chart["lines"]:
            yield panel, chart, _constant(chart, panel, runs)


def _panels(run: Run) -> Iterator[tuple[Panel, str]]:
    """Yield the charts of one run: related metrics share one, and another metric is alone."""
    columns = run["curves"]["columns"]
    first, *others = PANELS
    yield first, _meaning(first)
    yield from _evaluations(columns)
    for panel in others:
        yield panel, _meaning(panel)
    for metric in columns:
        if not _is_shown(metric):
            yield _alone(metric, "value", columns)


def _is_shown(metric: str) -> bool:
    """Whether another chart has the metric, or none needs it."""
    is_score = metric.startswith("eval/") and (
        metric in METRIC_OF_NAME or EVALUATION.fullmatch(metric) is not None
    )
    return metric in PANEL_OF_METRIC or is_score or metric in (STEP_TIME, "reward/mean_error")


def _evaluations(columns: dict[str, Any]) -> Iterator[tuple[Panel, str]]:
    """Yield a chart for each score, with a line for each set and the mean of several sets.

    A score that has the same values as an earlier one, as `avg@1` and `reward` of graders that
    give 0 and 1, is left out.
    """
    of_score: dict[str, list[Line]] = {}
    for metric in columns:
        if match := EVALUATION.fullmatch(metric):
            of_score.setdefault(match[2], []).append(Line(metric, match[1]))
    drawn: list[list[Any]] = []
    for score in sorted(of_score, key=_rank):
        lines, whole = of_score[score], f"eval/{score}"
        values = [columns[line.metric]["mean"] for line in lines]
        if _NOT_DRAWN.fullmatch(score) or values in drawn:
            continue
        drawn.append(values)
        if len(lines) > 1 and whole in columns:
            lines = [*lines, Line(whole, ALL_SETS)]
        meaning = f"eval/SET/{score}, of the weights after so many steps"
        for start in range(0, len(lines), len(LINES)):
            panel = _score_panel(score, lines[start : start + len(LINES)])
            is_main = score == main_score(columns)
            yield replace(panel, main=is_main, news_if_flat=is_main), meaning


def _rank(metric: str) -> int:
    """Return the place of a score among all scores."""
    score = metric.rpartition("/")[2]
    return list(_SCORES).index(score) if score in _SCORES else len(_SCORES)


def _score_panel(score: str, lines: Sequence[Line]) -> Panel:
    coloured = tuple(Line(*line[:2], LINES[i]) for i, line in enumerate(lines))
    is_share = score.startswith(("pass@", "avg@"))
    known = _SCORES.get(score, {"title": f"Evaluation: {score}", "share": is_share})
    return Panel(lines=coloured, **known)


def _panels_of_many(runs: Sequence[Run]) -> Iterator[tuple[Panel, str]]:
    """Yield a chart for each metric, with a line for each run."""
    columns: dict[str, Any] = {}
    for run in runs:
        columns |= dict.fromkeys(run["curves"]["columns"])
    num_sets = len({match[1] for name in columns if (match := EVALUATION.fullmatch(name))})
    known = [line.metric for panel in PANELS for line in panel.lines if line.metric in columns]
    scores = sorted((name for name in columns if name.startswith("eval/")), key=_rank)
    drawn: list[list[Any]] = []
    for metric in dict.fromkeys([*known[:1], *scores, *known, *columns]):
        match = EVALUATION.fullmatch(metric)
        is_mean = metric in METRIC_OF_NAME and metric.startswith("eval/") and num_sets == 1
        if is_mean or metric == "reward/mean_error" or (match and _NOT_DRAWN.fullmatch(match[2])):
            continue
        values = [run["curves"]["columns"].get(metric) for run in runs]
        if not match or values not in drawn:
            yield _alone(metric, "", columns)
        drawn += [values] if match else []


def _alone(metric: str, label: str, columns: dict[str, Any]) -> tuple[Panel, str]:
    """Return the chart of one metric alone, in the layout of the chart that has it."""
    known, like = METRIC_OF_NAME.get(metric), PANEL_OF_METRIC.get(metric)
    meaning = f"{known.meaning} ({metric})" if known else metric
    line = Line(metric, label, None)
    if match := EVALUATION.fullmatch(metric):
        panel = _score_panel(match[2], [line])
        return replace(panel, title=f"{panel.title}, {match[1]}"), meaning
    if like is None:
        unit, from_zero = known.unit if known else "", metric.startswith("time/")
        is_part = metric.startswith(PART)
        return Panel(_title(metric), (line,), unit, from_zero, main=is_part), meaning
    layout = replace(like, title=_title(metric), lines=(line,), stacked=False)
    return (replace(layout, unit=known.unit) if known else layout), meaning


def _title(metric: str) -> str:
    """Return the label of a known metric, and the name of one that only a recipe logs."""
    if known := METRIC_OF_NAME.get(metric):
        return known.label
    return f"Reward part: {metric[len(PART) :]}" if metric.startswith(PART) else metric


def _meaning(panel: Panel) -> str:
    known = [METRIC_OF_NAME[line.metric] for line in panel.lines if line.metric in METRIC_OF_NAME]
    return "\n".join(f"{metric.meaning} ({metric.name})" for metric in known)


def _chart(panel: Panel, meaning: str, runs: Sequence[Run]) -> Chart:
    lines = []
    for i, run in enumerate(runs):
        for place, line in enumerate(panel.lines):
            colour = LINES[i] if len(runs) > 1 else panel.colour(place)
            if _has(run, line.metric):
                lines.append(
                    {
                        "run": i,
                        "metric": line.metric,
                        "label": run["name"] if len(runs) > 1 else line.label,
                        "colour": colour.variable,
                    }
                )
    names = ("title", "unit", "from_zero", "share", "whole", "stacked")
    layout = {name: getattr(panel, name) for name in names}
    return layout | {"meaning": meaning, "lines": lines}


def _has(run: Run, metric: str) -> bool:
    columns = run["curves"]["columns"]
    return metric in columns or (metric == OTHER_TIME and STEP_TIME in columns)


def _constant(chart: Chart, panel: Panel, runs: Sequence[Run]) -> str | None:
    """Return the chart as a text if its lines never change, else None.

    Any difference between trainer and engine keeps its chart.
    """
    if panel.stacked:
        return None
    values = [_values(runs[line["run"]], line["metric"]) for line in chart["lines"]]
    if panel.whole and any(map(any, values)):
        return None
    said: dict[str, str] = {}
    for line, own in zip(chart["lines"], values, strict=True):
        text = _constant_value(own, panel)
        if text is None:
            return None
        said[line["label"]] = text
    title = chart["title"]
    title = title[0].lower() + title[1:] if re.match("[A-Z][a-z]", title) else title
    if len(set(said.values())) == 1:
        return f"{title} {next(iter(said.values()))}"
    return f"{title} {', '.join(f'{value} ({label})' for label, value in said.items())}"


def _constant_value(values: Sequence[float], panel: Panel) -> str | None:
    """Return the value of a line that never changes; None for one that does, or is known once."""
    largest = max(map(abs, values))
    if 0 < largest < panel.noise:
        return f"0 within rounding, at most {largest:.0e}"
    if min(values) == max(values) and (len(values) > 1 or not largest):
        return f"{values[0]:,.6g}"
    if panel.from_zero and len(values) > 1 and _is_level(values):
        return f"{min(values):,.4g} to {max(values):,.4g}"
    return None


def _is_level(values: Sequence[float]) -> bool:
    """Whether a line on an axis from 0 would look flat."""
    return max(values) - min(values) <= LEVEL * max(map(abs, values))


def _values(run: Run, metric: str) -> list[float]:
    """Return all values that the chart of a metric would draw, low and high ones included."""
    column = run["curves"]["columns"][metric]
    return [value for values in column.values() for value in values if value is not None]
