"""Table and pictures of docs/on-policy-study.md, made from runs.json.

python -m benchmarks.on_policy.figures
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.on_policy.runs import RUNS, TASKS, VARIANTS
from spmd_rl.report.pictures.colours import LINES

PAGE = Path(__file__).parents[2] / "docs" / "on-policy-study.md"
BEGIN, END = "<!-- made by benchmarks.on_policy.figures -->\n", "<!-- end -->\n"
COLOURS = {variant: colour.code for variant, colour in zip(VARIANTS, LINES, strict=False)}
DRAWN = {name: task for name, task in TASKS.items() if len(task.rates) == 3}
LAST = 5  # steps that a final value is averaged over
COLLAPSED = 0.5  # of its best reward, or less, at the end
Found = dict[str, Any]
Runs = list[Found]


def load(path: Path = RUNS) -> Runs:
    """Return the runs, their missing values as NaN."""
    runs: Runs = json.loads(path.read_text())["runs"]
    for run in runs:
        for name, column in run["steps"].items():
            run["steps"][name] = [math.nan if value is None else value for value in column]
    return runs


def of(runs: Runs, **wanted: Any) -> Runs:
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


def smooth(column: Sequence[float]) -> list[float]:
    """Return means of up to five steps, each with those before it."""
    return [float(np.mean(column[max(0, end - 5) : end])) for end in range(1, len(column) + 1)]


def final(run: Found, name: str = "reward") -> float:
    return statistics.mean(run["steps"][name][-LAST:])


def collapsed(run: Found) -> bool:
    """Whether the reward fell to half of its best, or anything that is compared is no number."""
    rewards = smooth(run["steps"]["reward"])
    is_broken = any(math.isnan(value) for value in run["steps"]["grad_norm"])
    return is_broken or rewards[-1] < COLLAPSED * max(rewards)


def groups(runs: Runs) -> Iterator[tuple[str, float, str, Runs]]:
    """Yield task, rate, variant, and its runs of all seeds."""
    for task, facts in TASKS.items():
        for lr in sorted(facts.rates):
            for variant in VARIANTS:
                if found := of(runs, task=task, lr=lr, variant=variant):
                    yield task, lr, variant, found


def table(runs: Runs) -> str:
    head = (
        "task", "rate", "engine", "seeds", "final reward", "held out", "best", "KL",
        "gradient norm", "clipped", "mean abs(dlogp)", "largest", "unequal", "collapsed",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| --- | --: | --- |" + " --: |" * (len(head) - 3)]
    for task, lr, variant, found in groups(runs):
        steps = [run["steps"] for run in found]
        tokens, unequal = (
            sum(np.nansum(column[name]) for column in steps) for name in ("tokens", "unequal")
        )
        cells = [
            task, f"{lr:g}", variant, str(len(found)),
            spread([final(run) for run in found]),
            spread([list(run["held_out"].values())[-1] for run in found if run["held_out"]]),
            spread([max(smooth(column["reward"])) for column in steps]),
            spread([final(run, "kl") for run in found]),
            short(statistics.median(chain.from_iterable(one["grad_norm"] for one in steps))),
            short(max(max(column["clip_frac"]) for column in steps)),
            short(statistics.mean(chain.from_iterable(one["mean_abs_dlogp"] for one in steps))),
            short(max(max(column["max_abs_dlogp"]) for column in steps)),
            (f"{unequal / tokens:.2%}" if unequal else "0") if tokens else "-",
            f"{sum(map(collapsed, found))}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> str:
    """Return mean, and least to largest of several."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    if len(known) == 1 or max(known) - min(known) < 5e-4:
        return short(statistics.mean(known))
    return f"{short(statistics.mean(known))} ({short(min(known))} to {short(max(known))})"


def short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def drawn(name: str, shape: tuple[int, int], draw: Callable[[Any], None]) -> None:
    """Write a picture whose bytes depend on nothing but the runs."""
    figure = Figure(figsize=(4.2 * shape[1], 2.9 * shape[0]), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.subplots(*shape, squeeze=False))
    folder = PAGE.with_suffix("")
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=72, metadata={"Software": None})


def bands(axes: Axes, runs: Runs, column: str, variants: Iterable[str] = VARIANTS) -> None:
    """Draw the mean over seeds of each variant, and from the least to the largest."""
    for variant in variants:
        found = [smooth(run["steps"][column]) for run in of(runs, variant=variant)]
        if not found:
            continue
        length = min(map(len, found))
        values = np.array([one[:length] for one in found])
        if np.isnan(values).all() or not values.any():
            continue
        steps = np.arange(1, length + 1)
        axes.plot(steps, values.mean(0), color=COLOURS[variant], label=variant, linewidth=1.4)
        axes.fill_between(
            steps, values.min(0), values.max(0), color=COLOURS[variant], alpha=0.15, linewidth=0
        )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")


def columns(runs: Runs, column: str, label: str, *, log: bool = False) -> Callable[[Any], None]:
    """Return a picture with a row for each task and a column for each rate."""

    def draw(places: Any) -> None:
        for row, (task, facts) in zip(places, DRAWN.items(), strict=True):
            for axes, lr in zip(row, sorted(facts.rates), strict=True):
                bands(axes, of(runs, task=task, lr=lr), column)
                if not axes.lines:
                    axes.set_axis_off()
                    continue
                axes.set_title(f"{task}, rate {lr:g}", fontsize=9)
                axes.set_ylabel(label)
                if log:
                    axes.set_yscale("log")
        places[0][0].legend(fontsize=7, frameon=False)

    return draw


def by_rate(runs: Runs) -> Callable[[Any], None]:
    def draw(places: Any) -> None:
        for axes, task in zip(places[0], DRAWN, strict=True):
            for variant in VARIANTS:
                found = of(runs, task=task, variant=variant)
                rates = sorted({run["lr"] for run in found})
                if not rates:
                    continue
                values = [[final(run) for run in found if run["lr"] == lr] for lr in rates]
                axes.plot(
                    rates, [statistics.mean(one) for one in values], "o-",
                    color=COLOURS[variant], label=variant, linewidth=1.2, markersize=3,
                )  # fmt: skip
                for lr, one in zip(rates, values, strict=True):
                    axes.plot([lr, lr], [min(one), max(one)], color=COLOURS[variant], alpha=0.4)
            axes.set_xscale("log")
            axes.set_xticks(found := sorted({run["lr"] for run in of(runs, task=task)}))
            axes.set_xticklabels([f"{lr:g}" for lr in found])
            axes.minorticks_off()
            axes.set_title(task, fontsize=9)
            axes.set_xlabel("learning rate")
            axes.set_ylabel("reward of the last five steps")
            axes.spines[["top", "right"]].set_visible(False)
        places[0][0].legend(fontsize=7, frameon=False)

    return draw


def main() -> int:
    runs = load()
    shape = (len(DRAWN), 3)
    drawn("rewards", shape, columns(runs, "reward", "reward"))
    drawn("mismatch", shape, columns(runs, "mean_abs_dlogp", "mean abs(dlogp)", log=True))
    drawn("gradients", shape, columns(runs, "grad_norm", "gradient norm", log=True))
    drawn("rates", (1, len(DRAWN)), by_rate(runs))
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(runs) + "\n" + END + rest.split(END)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
