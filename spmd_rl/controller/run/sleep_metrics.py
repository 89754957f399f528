"""Metrics of sleep: what the receipts of a role's ranks add to a step."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_rl.offload.residency import Receipt

GIB = 1 << 30


def sleep_metrics(what: str, receipts: Sequence[Receipt]) -> dict[str, float]:
    """Return the metrics of one sleep or wake, of the rank that has most of each.

    The values of a step add up.
    """
    moved = max(abs(sum(one.before.values()) - sum(one.after.values())) for one in receipts)
    copied = max(one.copied_bytes for one in receipts)
    metrics = {"memory/copied_gib": copied / GIB}
    if what == "sleep":
        metrics["memory/slept_gib"] = moved / GIB
    return metrics


def span_arguments(receipts: Sequence[Receipt]) -> dict[str, float]:
    """Return what a span of the trace says of one sleep or wake: of the slowest rank."""
    return {
        "map_s": max(one.map_s for one in receipts),
        "copy_s": max(one.copy_s for one in receipts),
        "copied_bytes": max(one.copied_bytes for one in receipts),
    }
