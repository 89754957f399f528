"""Command line of the comparisons with SGLang: one pair of engines measures each model's rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from benchmarks.engines import PACKAGES, Pair, pair, versions
from benchmarks.record import finish, gpu, gpu_machine
from benchmarks.table import Row

ROOMS = ("kernels", "model", "rollout")
Measure = Callable[[str, Pair, int], Iterable[Row]]


def beside_sglang(
    script: str, doc: str | None, models: Iterable[str], repeats: int, measure: Measure
) -> int:
    """Measure and record; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(models))
    parser.add_argument("--sglang", required=True, metavar="SITE")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        with pair(name, options.sglang) as engines:
            found = versions(engines.sglang)
            rows += measure(name, engines, options.repeats)
    facts = gpu() | found
    return finish(
        script, PACKAGES, rows, save=options.save, rooms=ROOMS, machine=gpu_machine(), **facts
    )
